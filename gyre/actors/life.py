"""One life of an actor: the task that handles its messages, what it started, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gyre.actors.actor import Actor, Context
from gyre.actors.background import Background, Timer
from gyre.actors.begun import Begun, begin
from gyre.actors.envelope import CURRENT, Chain, Envelope
from gyre.actors.errors import ActorDied, ExitReason, Remembered, as_seen_by_caller
from gyre.actors.family import KILL_WAIT_S, Child, Family
from gyre.actors.handlers import INSIDE, STARTING
from gyre.actors.local import LocalTarget
from gyre.actors.log import log
from gyre.actors.messages import Tell, wire_name
from gyre.actors.ref import ASK_TIMEOUT_S, Ref
from gyre.actors.streams import Sink

if TYPE_CHECKING:
    from gyre.actors.node import Node

T = TypeVar("T")

MESSAGES_A_TURN = 128

_CANCELLED = ExitReason(kind="stopped", message="its task was cancelled")


class Life(LocalTarget):
    """Runs one actor from `started` to `stopping`. Its main task handles what comes, and ends when nothing
    has come for a while (`idle`): an idle actor has none, and takes little memory."""

    __slots__ = (
        "_background",
        "_begun",
        "_context",
        "_failure",
        "_family",
        "_handling",
        "_interrupted",
        "_killed",
        "_main",
        "_ready",
        "_rest",
        "_stirred",
        "_stop",
        "actor",
        "home",
        "last_error",
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
        super().__init__(node, type(actor).table, name, incarnation, capacity, id)
        self.actor = actor
        self.home = home
        self.last_error: Remembered | None = None
        self.shutdown_s = ASK_TIMEOUT_S
        self._ready = False
        self._stop: ExitReason | None = None  # it ends after the message at hand
        self._failure: ExitReason | None = None  # it ends at once
        self._killed = False
        self._interrupted = False
        self._main: asyncio.Task[None] | None = None
        self._rest: asyncio.Future[bool] | None = None  # the main task waits for a message
        self._begun: Begun | None = None  # the handler at hand, which the main task is to go on with
        self._stirred = False  # a message was handled while the main task rested
        self._context = copy_context()
        self._handling: dict[asyncio.Task[Any], Envelope] | None = None
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

    def put(self, envelope: Envelope) -> None:
        if envelope.handler.exclusive or not self._ready:
            queue = self.mailbox.queue
            if queue is None:
                self.mailbox.put(envelope)
            else:
                queue.append(envelope)
            if self._rest is not None or self._main is None:
                self._wake()
        else:
            self._start_task(envelope)

    def put_at_once(self, envelope: Envelope) -> None:
        """As `put`. Called by no task while the main task rests, it begins the handler here: an ask that
        waits for nothing is answered without another turn of the loop."""
        rest, main = self._rest, self._main
        resting = rest is not None and not rest.done() and asyncio.current_task(self._loop) is None
        if main is None or not resting or not envelope.handler.exclusive:
            self.put(envelope)
        else:
            self._stirred = True
            if envelope.origin is not None:
                envelope.origin.taken(self.id)
            self._context.run(self._handle_at_once, envelope, main)

    def put_system(self, envelope: Envelope) -> None:
        self.mailbox.put_system(envelope)
        self._wake()

    def cancel(self, envelope: Envelope) -> None:
        # One that still waits in the mailbox is skipped when its turn comes.
        if envelope.task is not None:
            envelope.task.cancel()
        elif envelope is self._current and self._main is not None:
            self._interrupted = True
            self._main.cancel()

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

    def _wake(self) -> None:
        """Sees to it that the main task looks at mailbox, stop and failure."""
        rest = self._rest
        if rest is not None:
            self._rest = None
            if not rest.done():
                rest.set_result(True)
        elif self._main is None and self._ready and self.exit is None:
            self._main = self._loop.create_task(self._work(), name=self.ref.name, context=self._context)
            self.node.idle.watch(self)

    def resting(self) -> asyncio.Future[bool] | None:
        """The same as long as no message comes; None where one has come since it was asked last."""
        stirred, self._stirred = self._stirred, False
        return None if stirred else self._rest

    def doze(self) -> None:
        """No message has come for a while: the main task ends."""
        rest, self._rest = self._rest, None
        if rest is not None and not rest.done():
            rest.set_result(False)

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

    async def _serve(self) -> None:
        """Handles what comes, one after another, until nothing has for a while or the life is to end."""
        actor, mailbox = self.actor, self.mailbox
        queue = mailbox.open()
        envelope: Any
        result: Any
        turn = 0
        while self._stop is None and self._failure is None:
            if queue and mailbox.system is None and mailbox.writers is None:
                envelope = queue.popleft()
            elif (taken := mailbox.take()) is not None:
                envelope = taken
            else:
                turn = 0
                envelope = result = None  # else what it handled last would stay as long as nothing comes
                awake = await self._nap()
                begun, self._begun = self._begun, None
                if begun is not None:
                    await self._finish(begun)
                elif not awake:
                    if not queue and mailbox.system is None:
                        return
                    self.node.idle.watch(self)  # a message came as it dozed off
                continue
            handler = envelope.handler
            if not handler.exclusive and not envelope.void:  # it came before `started` had ended
                self._start_task(envelope)
                continue
            if envelope.origin is not None:
                envelope.origin.taken(self.id)
            if envelope.void:
                continue
            self._current = envelope
            CURRENT.set(envelope)
            try:
                result = await handler.method(actor, envelope.message)
            except (Exception, asyncio.CancelledError) as error:
                self._failed(envelope, error)
            else:
                answer = envelope.answer
                if answer is not None and not answer.done():
                    answer.set_result(result)
            self._current = None
            envelope.deadline = None  # what outlives its handler is not bound by it
            if self._interrupted:
                self._forgive()
            turn += 1
            if turn >= MESSAGES_A_TURN:
                turn = 0
                await asyncio.sleep(0)

    async def _nap(self) -> bool:
        """Until something comes: False where nothing has for a while. A handler that has begun goes on."""
        rest: asyncio.Future[bool] = self._loop.create_future()
        self._rest = rest
        try:
            return await rest
        except asyncio.CancelledError:
            if self._begun is None:
                raise
            # Meant for the handler, by its asker, a timeout or a group of its own: again when it goes on.
            main = cast("asyncio.Task[None]", self._main)
            main.uncancel()
            main.cancel()
            return True

    async def _finish(self, begun: Begun) -> None:
        """The rest of the handler at hand."""
        envelope = cast(Envelope, self._current)
        try:
            self._answered(envelope, await begun)
        except (Exception, asyncio.CancelledError) as error:
            self._failed(envelope, error)
        self._current = None
        envelope.deadline = None
        if self._interrupted:
            self._forgive()

    def _handle_at_once(self, envelope: Envelope, main: asyncio.Task[None]) -> None:
        """Of an exclusive handler what can be done without waiting; all, mostly."""
        self._current = envelope
        CURRENT.set(envelope)
        try:
            self._begun = begin(envelope.handler.method(self.actor, envelope.message), main)
            self._wake()
            return
        except StopIteration as end:
            self._answered(envelope, end.value)
        except (Exception, asyncio.CancelledError) as error:
            try:
                self._raised(envelope, error)
            except Exception as crash:
                self._fail(ExitReason.of(crash))
                self._wake()
        self._current = None
        envelope.deadline = None
        CURRENT.set(None)

    def _answered(self, envelope: Envelope, result: Any) -> None:
        if envelope.answer is not None and not envelope.answer.done():
            envelope.answer.set_result(result)

    def _failed(self, envelope: Envelope, error: BaseException) -> None:
        """An exclusive handler has raised. Raises what is its actor's crash."""
        if isinstance(error, asyncio.CancelledError):
            if self._failure is not None:
                raise error
            if self._interrupted:
                return
        self._raised(envelope, error)

    def _forgive(self) -> None:
        """The handler at hand was cancelled, not the main task."""
        self._interrupted = False
        cast("asyncio.Task[None]", self._main).uncancel()

    def _raised(self, envelope: Envelope, error: BaseException) -> None:
        """To its asker; without one it is the actor's crash."""
        if isinstance(error, asyncio.CancelledError):
            error = RuntimeError("a task that its handler waited for was cancelled")
        if envelope.answer is None:
            raise error
        seen = as_seen_by_caller(error, self.ref)
        self.last_error = Remembered.of(seen, wire_name(type(envelope.message)), self._loop.time())
        if not envelope.answer.done():
            envelope.answer.set_exception(seen)

    def _start_task(self, envelope: Envelope) -> None:
        task = self._loop.create_task(self._handle(envelope), context=self._context.copy())
        envelope.task = task
        if self._handling is None:
            self._handling = {}
        self._handling[task] = envelope
        self.mailbox.running += 1
        task.add_done_callback(self._handled)

    async def _handle(self, envelope: Envelope) -> None:
        CURRENT.set(envelope)
        handler = envelope.handler
        try:
            if handler.streams:
                await self._stream(envelope)
                return
            result = await handler.method(self.actor, envelope.message)
        except asyncio.CancelledError as error:
            if envelope.void or self.exit is not None:
                raise
            self._raised(envelope, error)
        except Exception as error:
            self._raised(envelope, error)
        else:
            if envelope.answer is not None and not envelope.answer.done():
                envelope.answer.set_result(result)
        finally:
            envelope.deadline = None

    async def _stream(self, envelope: Envelope) -> None:
        sink, handler = cast(Sink, envelope.answer), envelope.handler
        skip = 0 if handler.positioned else sink.start
        async with contextlib.aclosing(handler.method(self.actor, envelope.message)) as items:
            async for item in items:
                if skip:
                    skip -= 1
                else:
                    await sink.put(item)
        sink.end()

    def _handled(self, task: asyncio.Task[Any]) -> None:
        envelope = cast("dict[asyncio.Task[Any], Envelope]", self._handling).pop(task)
        self.mailbox.running -= 1
        self.mailbox.give_room()
        if envelope.origin is not None:
            envelope.origin.taken(self.id)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._task_failed(error)

    def _task_failed(self, error: BaseException) -> None:
        self.crash(ExitReason.of(error))

    def _stop_with(self, reason: ExitReason) -> None:
        if self._stop is None:
            self._stop = reason
            self._wake()

    def _fail(self, reason: ExitReason) -> None:
        self._failure = self._failure or reason

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
