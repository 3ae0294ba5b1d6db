"""Handling what comes: one message after another in the main task, concurrent ones in tasks beside it."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, cast

from gyre.actors.actor import Actor
from gyre.actors.begun import begin
from gyre.actors.envelope import CURRENT, Envelope
from gyre.actors.errors import ExitReason, Remembered, as_seen_by_caller
from gyre.actors.local import LocalTarget
from gyre.actors.messages import wire_name
from gyre.actors.streams import Sink

if TYPE_CHECKING:
    from gyre.actors.node import Node

MESSAGES_A_TURN = 128


class Handling(LocalTarget, ABC):
    """The part of a Life that its messages have to do with. Its main task handles what comes, and ends when
    nothing has come for a while (`idle`): an idle actor has none, and takes little memory."""

    __slots__ = (
        "_begun",
        "_context",
        "_failure",
        "_handling",
        "_interrupted",
        "_main",
        "_ready",
        "_rest",
        "_stirred",
        "_stop",
        "actor",
        "last_error",
    )

    def __init__(
        self, node: Node, actor: Actor, name: str, incarnation: int, capacity: int, id: int = 0
    ) -> None:
        super().__init__(node, type(actor).table, name, incarnation, capacity, id)
        self.actor = actor
        self.last_error: Remembered | None = None
        self._ready = False
        self._stop: ExitReason | None = None  # it ends after the message at hand
        self._failure: ExitReason | None = None  # it ends at once
        self._interrupted = False
        self._main: asyncio.Task[None] | None = None
        self._rest: asyncio.Future[bool] | None = None  # the main task waits for a message
        self._begun: Awaitable[Any] | None = None  # the handler at hand, which the main task is to go on with
        self._stirred = False  # a message was handled while the main task rested
        self._context = copy_context()
        self._handling: dict[asyncio.Task[Any], Envelope] | None = None

    @abstractmethod
    def crash(self, reason: ExitReason) -> None:
        """Something of it failed outside its handlers, or what it is linked with died."""

    @abstractmethod
    async def _work(self) -> None:
        """The main task."""

    # --- what comes -----------------------------------------------------------------------------

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

    # --- in the main task -------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Handles what comes, one after another, until nothing has for a while or the life is to end."""
        actor, mailbox = self.actor, self.mailbox
        queue = mailbox.open()
        envelope: Envelope | None
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

    async def _finish(self, begun: Awaitable[Any]) -> None:
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
        except BaseException as exit:  # it ends the process, which whoever called might not let it
            self._begun = _raise(exit)
            self._wake()
            return
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

    def _fail(self, reason: ExitReason) -> None:
        self._failure = self._failure or reason

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

    # --- beside it --------------------------------------------------------------------------------

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


async def _raise(error: BaseException) -> None:
    raise error
