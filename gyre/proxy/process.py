"""The ProxyActor in a process of its own, as its keeper starts it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from collections.abc import MutableMapping
from typing import Any

import msgspec
import structlog

from gyre.actors import ActorError, Ref, handles
from gyre.proxy.actor import ProxyActor, ProxyActorConfig
from gyre.proxy.messages import CallDelivered, Happened, KnowEngines, RestoreExecution, RestoreKeys
from gyre.proxy.restoring import restore
from gyre.proxy.sockets import Descriptors, ListeningSockets
from gyre.schedule.messages import CloseRoute, RouteClosed
from gyre.trajectory.messages import GetCalls

# Objects. A body of a long conversation is some thousands.
_COLLECT_AFTER = 10_000


class ProxyProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`held` are the sockets that its keeper listens at."""

    proxy: ProxyActorConfig
    trajectory: Ref
    keeper: Ref
    held: Descriptors


class ProxyProcess(ProxyActor):
    """In its first life it takes calls when it has started, in others when it is restored."""

    def __init__(self, config: ProxyProcessConfig) -> None:
        super().__init__(config.proxy, config.trajectory, ListeningSockets.inherited(config.held))
        self._keeper = config.keeper
        self._events: Events

    async def started(self) -> None:
        # A collection looks at each message and token of the calls in flight, of which none is garbage.
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER, 10, 10)
        self._events = Events()
        structlog.configure(processors=[self._events, *structlog.get_config()["processors"]])
        self.context.run(self._events.tell(self._keeper), name="events")
        await self.prepare()
        if self.context.incarnation == 1:
            await self.serve()

    @handles(RestoreExecution, concurrent=True)
    async def restore_execution(self, message: RestoreExecution) -> None:
        """Its calls are asked for again until each has an answer: the same, where that is recorded."""
        execution = self.desk.open(message.opening)
        stream = self._trajectory.stream(GetCalls(execution=execution.name))
        records = [record async for record in stream]
        lives = self.context.incarnation - 1
        restore(self.desk, execution, records, frozenset(message.delivered), lives)

    @handles(KnowEngines)
    async def know_engines(self, message: KnowEngines) -> None:
        self._routes.know(message.cell, message.engines)

    @handles(RestoreKeys)
    async def restore_keys(self, message: RestoreKeys) -> None:
        self.desk.close_keys(message.closed)
        await self.serve()

    @handles(CloseRoute, concurrent=True)
    async def close_route(self, message: CloseRoute) -> RouteClosed:
        closed = await super().close_route(message)
        # Its events are told before whoever has ordered it goes on.
        await self._events.told()
        return closed

    async def delivered(self, execution: str, call: str) -> None:
        told = CallDelivered(execution=execution, call=call, totals=self.desk.totals())
        await self._keeper.tell(told)


class Events:
    """A structlog processor: what is logged here, by any thread, is told to the keeper, who logs it where the
    job's events are."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._untold: deque[Happened] = deque()
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    def __call__(self, _: Any, level: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if level != "debug":
            fields = dict(event)
            if fields.pop("exc_info", None):
                fields = dict(structlog.processors.format_exc_info(None, level, {**event}))
            name = str(fields.pop("event", ""))
            told = msgspec.to_builtins(fields, str_keys=True, enc_hook=str)
            self._hear(Happened(level=level, event=name, fields=told))
        return event

    def _hear(self, happened: Happened) -> None:
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self._hear, happened)
            return
        self._untold.append(happened)
        self._none.clear()
        self._some.set()

    async def tell(self, keeper: Ref) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            while self._untold:
                try:
                    await keeper.tell(self._untold[0])
                except ActorError:
                    return  # The keeper is gone, and so is this process soon.
                self._untold.popleft()
            self._none.set()

    async def told(self) -> None:
        """Waits until all are."""
        await self._none.wait()
