"""One life of an actor: the task that handles its messages, what it started, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gyre.actors.actor import Actor, Context
from gyre.actors.background import Background, Timer
from gyre.actors.envelope import CURRENT, Chain, Envelope
from gyre.actors.errors import ActorDied, ExitReason
from gyre.actors.family import KILL_WAIT_S, Child, Family
from gyre.actors.handlers import INSIDE, STARTING
from gyre.actors.handling import Handling
from gyre.actors.log import log
from gyre.actors.messages import Tell, wire_name
from gyre.actors.ref import ASK_TIMEOUT_S, Ref

if TYPE_CHECKING:
    from gyre.actors.node import Node

T = TypeVar("T")

_CANCELLED = ExitReason(kind="stopped", message="its task was cancelled")


class Life(Handling):
    """Runs one actor from `started` to `stopping`."""

    __slots__ = (
        "_background",
        "_family",
        "_killed",
        "home",
        "shutdown_s",
    )

    def __init__(
        self,
        node: Node,
        actor: Actor,
        name: str,
        incarnation: int,
        capacity: int,
        home: Family | None = None,
        id: int = 0,
    ) -> None:
        super().__init__(node, actor, name, incarnation, capacity, id)
        self.home = home
        self.shutdown_s = ASK_TIMEOUT_S
        self._killed = False
        self._background: Background | None = None
        self._family: Family | None = None
        actor.context = Context(self)

    # --- from the node, the parent, a link ------------------------------------------------------

    async def start(self, shutdown_s: float) -> None:
        """Returns when `started` has; raises nothing: `ended` says whether it failed."""
        self.shutdown_s = shutdown_s
        if type(self.actor).started is Actor.started:  # nothing to wait for
            self.begin()
            return
        up: asyncio.Future[None] = self._loop.create_future()
        self._main = self._loop.create_task(self._begin(up), name=self.ref.name, context=self._context)
        self.node.idle.watch(self)
        parent = CURRENT.get()
        chain: Chain = () if parent is None else parent.chain_from_here()
        if chain:
            self.node.waits.add(chain[-1].message_id, self)
        try:
            await up
        except asyncio.CancelledError:
            self.kill()
            await asyncio.wait([self.ended], timeout=KILL_WAIT_S)
            raise
        finally:
            if chain:
                self.node.waits.discard(chain[-1].message_id, self)

    def begin(self) -> None:
        """It takes messages."""
        self._ready = True

    def request_stop(self) -> None:
        self._stop_with(ExitReason(kind="stopped"))

    def kill(self) -> None:
        """Ends it without asking: handlers are cancelled, `stopping` is skipped or cut short."""
        self._killed = True
        self._abort(ExitReason(kind="stopped", message="it did not stop in time"))

    def crash(self, reason: ExitReason) -> None:
        """Something of it failed outside its handlers, or what it is linked with died."""
        if self.exit is None:
            self._abort(reason)

    # --- from inside: the context ---------------------------------------------------------------

    @property
    def family(self) -> Family:
        if self._family is None:
            self._family = Family(
                self.node, self.ref.label, self.actor.supervision, self.crash, self.deliver, self
            )
            if self.ended.done():
                self._family.kill()
        return self._family

    def find(self, path: str) -> Ref | None:
        return None if self._family is None else self._family.lookup(path)

    def stop_itself(self) -> None:
        self._stop_with(ExitReason(kind="normal"))

    @property
    def background(self) -> Background:
        if self._background is None:
            self._background = Background(self._loop, self._task_failed)
        return self._background

    def tell_after(self, delay_s: float, message: Tell) -> Timer:
        kind = type(message)
        if kind not in self._handlers:
            self._unhandled(message)

        def deliver() -> None:
            self.put(Envelope(message, self._handlers[kind], self, self.node.new_id(), 0))

        return self.background.after(delay_s, deliver)

    def run(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        context = self._context.copy()
        context.run(CURRENT.set, self._scope())
        label = f"{self.ref.label}/{name or getattr(coroutine, '__qualname__', 'task')}"
        return self.background.run(coroutine, label, context)

    # --- for those who look ---------------------------------------------------------------------

    @property
    def path(self) -> str:
        """Its name, after those of the actors of this process that it lives below."""
        return self.ref.name if self.home is None else self.home.path_of(self.ref.name)

    @property
    def ready(self) -> bool:
        return self._ready

    @property
    def children(self) -> Mapping[str, Child]:
        return {} if self._family is None else self._family.children

    @property
    def tasks(self) -> int:
        """Background tasks and timers."""
        return 0 if self._background is None else self._background.pending

    def under_way(self) -> list[Envelope]:
        """The messages that are being handled."""
        current = self._current
        exclusive = [] if current is None or current.handler is STARTING else [current]
        return [*exclusive, *(self._handling or {}).values()]

    # --- the life itself ------------------------------------------------------------------------

    async def _begin(self, up: asyncio.Future[None]) -> None:
        parent = CURRENT.get()  # the context is that of who spawned it
        chain: Chain = () if parent is None else parent.chain_from_here()
        self._current = Envelope(None, STARTING, self, self.node.new_id(), 0, None, chain)
        CURRENT.set(self._current)
        try:
            if self._failure is None:
                await self.actor.started()
        except asyncio.CancelledError:
            self._fail(_CANCELLED)
        except Exception as error:
            self._fail(ExitReason.of(error))
        self._current = None
        if self._failure is None:
            self._ready = True
            up.set_result(None)
        await self._work()
        if not up.done():
            up.set_result(None)

    async def _work(self) -> None:
        """The main task. Between its last look and its end nobody else runs."""
        try:
            await self._serve()
        except asyncio.CancelledError:
            self._fail(_CANCELLED)
        except Exception as error:
            self._fail(ExitReason.of(error))
        reason = self._failure or self._stop
        if reason is not None:
            await self._close(reason)
        CURRENT.set(None)  # else the context would keep the last message
        CURRENT.set(None)  # else an idle actor would keep its last message and what it answered
        self._main = None
        self.mailbox.shrink()

    def _stop_with(self, reason: ExitReason) -> None:
        if self._stop is None:
            self._stop = reason
            self._wake()

    def _abort(self, reason: ExitReason) -> None:
        self._fail(reason)
        if self._current is None and self.exit is None:
            self._wake()
        elif self._main is not None:
            self._main.cancel()  # a handler, `started`, `stopping`

    def _scope(self) -> Envelope:
        """What its background tasks and its `stopping` run in."""
        return Envelope(None, INSIDE, self, 0, 0)

    # --- the end --------------------------------------------------------------------------------

    async def _close(self, reason: ExitReason) -> None:
        self.exit = reason
        self._fail_what_waits(reason)
        if self._background is not None:
            self._background.cancel_timers()
        CURRENT.set(self._scope())
        main = cast("asyncio.Task[None]", self._main)
        while main.cancelling():
            main.uncancel()
        if not self._killed:
            await self._wind_up()
        if self._family is not None:
            await self._end_children(self._family)
        self._gone(reason)

    async def _wind_up(self) -> None:
        """What it has under way ends, then `stopping` runs, all within `shutdown_s`."""
        try:
            async with asyncio.timeout(self.shutdown_s):
                if tasks := self._cancel_tasks():
                    await asyncio.wait(tasks)
                await self.actor.stopping()
        except asyncio.CancelledError:
            self._killed = True
        except TimeoutError:
            log.warning("actor_stopping_timed_out", actor=self.ref.label, shutdown_s=self.shutdown_s)
        except Exception as error:
            log.warning("actor_stopping_failed", actor=self.ref.label, error=str(ExitReason.of(error)))

    async def _end_children(self, family: Family) -> None:
        """In order, or at once when it is killed: nobody shall find it dead and a child of it alive."""
        try:
            if not self._killed:
                await family.close()
        except asyncio.CancelledError:
            self._killed = True
        if self._killed:
            with contextlib.suppress(asyncio.CancelledError):  # killed once more
                await family.end()

    def _cancel_tasks(self) -> list[asyncio.Task[Any]]:
        handling = [*(self._handling or ())]
        for task in handling:
            task.cancel()
        return [*handling, *(self._background.cancel() if self._background is not None else ())]

    def _fail_what_waits(self, reason: ExitReason) -> None:
        waiting = [*(self._handling or {}).values()]
        if self._current is not None:
            waiting.append(self._current)
        unread = self.mailbox.close()
        for envelope in (*waiting, *unread):
            if envelope.answer is not None and not envelope.answer.done():
                envelope.answer.set_exception(ActorDied(self.ref, reason))
        for envelope in unread:
            if envelope.origin is not None:
                envelope.origin.taken(self.id)
            if envelope.answer is None:
                self.node.dead_letter(self.ref, wire_name(type(envelope.message)), reason)

    def _gone(self, reason: ExitReason) -> None:
        self._cancel_tasks()
        if self._family is not None:
            self._family.kill()
        self.node.forget(self)
        self.watched = bool(self.watchers)
        self.actor = Actor()  # whoever keeps the Ref must not keep the state
        self.ended.set_result(reason)
        self.stop_watching(reason)
