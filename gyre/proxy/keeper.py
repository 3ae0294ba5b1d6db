"""The ProxyKeeper: holds the addresses of a proxy that is a process of its own, and starts it anew where it
dies, with the executions and routes that were open. Connections wait meanwhile."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from gyre.actors import Actor, ActorDied, Ask, ProcessSpec, Ref, Restarted, handles
from gyre.actors.supervision import Supervision
from gyre.proxy.actor import ProxyActorConfig
from gyre.proxy.messages import (
    CallDelivered,
    CloseExecution,
    ExecutionAccess,
    GetBaseUrl,
    GetProxyTotals,
    Happened,
    KnowEngines,
    OpenExecution,
    ProxyTotals,
    RestoreExecution,
    RestoreKeys,
    added_totals,
)
from gyre.proxy.process import ProxyProcessConfig
from gyre.proxy.sockets import ListeningSockets
from gyre.schedule.messages import CallsInFlight, CloseRoute, OpenRoute, RouteClosed, WatchCalls

log = structlog.get_logger()

_R = TypeVar("_R")
_CLOSED_KEYS = 4096
_NO_TOTALS = ProxyTotals(**dict.fromkeys(ProxyTotals.__struct_fields__, 0))
# Whoever asks has time limits of its own.
_ASK_S = 24 * 3600.0


@dataclass
class _Open:
    """An execution, and its calls whose answers have reached its harness."""

    opening: OpenExecution
    delivered: set[str] = field(default_factory=set)


class ProxyKeeper(Actor):
    """Answers what a ProxyActor does, and where that listens. Starts when it does. Raises CannotListen,
    SpawnFailed."""

    supervision = Supervision(max_restarts=20, window_s=60.0)

    def __init__(self, config: ProxyActorConfig, trajectory: Ref, log_path: Path | None = None) -> None:
        self._config = config
        self._trajectory = trajectory
        self._log_path = log_path
        self._executions: dict[str, _Open] = {}
        self._routes: dict[int, OpenRoute] = {}
        # Of each cell in its last life, whatever its role: they know what they have sampled.
        self._engines: dict[int, tuple[Ref, ...]] = {}
        self._closed_keys: deque[str] = deque(maxlen=_CLOSED_KEYS)
        # Of earlier lives, and of this one as far as it has told.
        self._past = self._told = _NO_TOTALS
        self._sockets: ListeningSockets | None = None
        self._base_url = ""
        self._proxy: Ref
        self._back = asyncio.Event()

    async def started(self) -> None:
        sockets = self._sockets = await ListeningSockets.open(self._config.proxy, self._config.unix_socket)
        self._base_url = sockets.base_url
        held = sockets.descriptors
        spec = ProcessSpec(
            name="process",
            actor="gyre.proxy.process:ProxyProcess",
            config=ProxyProcessConfig(
                proxy=self._config, trajectory=self._trajectory, keeper=self.context.ref, held=held
            ),
            # One text is encoded at a time: other threads would only be waited for.
            environment={"TOKENIZERS_PARALLELISM": "false"},
            log_path=self._log_path,
            restart="permanent",
            inherits=(held.tcp,) if held.unix is None else (held.tcp, held.unix),
        )
        self._proxy = await self.context.spawn(spec)
        unix_socket = str(self._config.unix_socket or "")
        log.info("proxy_listening", base_url=self._base_url, unix_socket=unix_socket)

    async def stopping(self) -> None:
        if self._sockets is not None:
            self._sockets.close()

    def summary(self) -> Mapping[str, Any]:
        return {"base_url": self._base_url, "executions_open": len(self._executions)}

    @handles(GetBaseUrl)
    async def base_url(self, message: GetBaseUrl) -> str:
        return self._base_url

    @handles(OpenExecution, concurrent=True)
    async def open_execution(self, message: OpenExecution) -> ExecutionAccess:
        self._forget(message.execution)
        opening = msgspec.structs.replace(message, key=f"gyre-{secrets.token_urlsafe(24)}")
        self._executions[message.execution] = _Open(opening)
        return await self._ask(opening)

    @handles(CloseExecution, concurrent=True)
    async def close_execution(self, message: CloseExecution) -> None:
        self._forget(message.execution)
        await self._ask(message)

    @handles(OpenRoute, concurrent=True)
    async def open_route(self, message: OpenRoute) -> None:
        self._routes[message.cell] = message
        self._engines[message.cell] = message.engines
        await self._ask(message)

    @handles(CloseRoute, concurrent=True)
    async def close_route(self, message: CloseRoute) -> RouteClosed:
        self._routes.pop(message.cell, None)
        return await self._ask(message)

    @handles(WatchCalls)
    async def watch_calls(self, message: WatchCalls) -> AsyncIterator[CallsInFlight]:
        while True:
            back = self._back
            try:
                async with aclosing(self._proxy.stream(message)) as counts:
                    async for calls in counts:
                        yield calls
            except ActorDied:
                yield CallsInFlight(calls=0)
                await back.wait()

    @handles(GetProxyTotals, concurrent=True)
    async def totals(self, message: GetProxyTotals) -> ProxyTotals:
        return added_totals(self._past, await self._ask(message))

    @handles(CallDelivered)
    async def delivered(self, message: CallDelivered) -> None:
        self._told = message.totals
        if execution := self._executions.get(message.execution):
            execution.delivered.add(message.call)

    @handles(Happened)
    async def happened(self, message: Happened) -> None:
        """What a proxy logs is an event of the job."""
        getattr(log, message.level)(message.event, **message.fields)

    @handles(Restarted)
    async def restarted(self, message: Restarted) -> None:
        log.warning("proxy_died", reason=str(message.reason), executions=len(self._executions))
        self._past = added_totals(self._past, msgspec.structs.replace(self._told, in_flight=0))
        self._told = _NO_TOTALS
        try:
            await self._restore(message.ref)
        except ActorDied:
            return  # Its next life is on its way.
        self._proxy = message.ref
        back, self._back = self._back, asyncio.Event()
        back.set()
        log.info("proxy_back", base_url=self._base_url)

    async def _restore(self, proxy: Ref) -> None:
        """Executions and routes; it takes calls when it has them."""
        restored = [
            RestoreExecution(opening=execution.opening, delivered=tuple(sorted(execution.delivered)))
            for execution in self._executions.values()
        ]
        await asyncio.gather(*(proxy.ask(execution, timeout_s=_ASK_S) for execution in restored))
        for cell, engines in tuple(self._engines.items()):
            await proxy.ask(KnowEngines(cell=cell, engines=engines), timeout_s=_ASK_S)
        for route in tuple(self._routes.values()):
            await proxy.ask(route, timeout_s=_ASK_S)
        await proxy.ask(RestoreKeys(closed=tuple(self._closed_keys)), timeout_s=_ASK_S)

    def _forget(self, execution: str) -> None:
        if (closed := self._executions.pop(execution, None)) is not None:
            self._closed_keys.append(closed.opening.key)

    async def _ask(self, message: Ask[_R]) -> _R:
        """Of the next life, where this one dies over it: each of these may be asked again."""
        while True:
            proxy, back = self._proxy, self._back
            try:
                return await proxy.ask(message, timeout_s=_ASK_S)
            except ActorDied:
                await back.wait()
