"""Where a Ref leads when its actor lives in this process: no encoding, no task, one future an ask."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from gyre.actors.bonds import Bonds
from gyre.actors.envelope import CURRENT, Chain, Envelope, deadline_of
from gyre.actors.errors import (
    ActorDied,
    AskTimeout,
    ExitReason,
    MailboxFull,
    UnhandledMessage,
    WouldDeadlock,
)
from gyre.actors.handlers import Handler, HandlerTable
from gyre.actors.mailbox import Mailbox
from gyre.actors.messages import Down, Message, Tell, wire_name
from gyre.actors.ref import ASK_TIMEOUT_S, Ref
from gyre.actors.streams import ItemStream, Pipe
from gyre.actors.waits import Far
from gyre.actors.watching import Watchers

if TYPE_CHECKING:
    from gyre.actors.node import Node


class LocalTarget:
    """The outside of a Life. `exit` is set from the moment no message is taken any more; `ended` resolves
    when all of it, children included, is gone."""

    __slots__ = (
        "_bonds",
        "_current",
        "_handlers",
        "_loop",
        "ended",
        "exit",
        "id",
        "mailbox",
        "node",
        "ref",
        "table",
        "watched",
        "watchers",
    )

    def __init__(
        self, node: Node, table: HandlerTable, name: str, incarnation: int, capacity: int, id: int = 0
    ) -> None:
        self.node = node
        self.id = id or node.new_id()
        self.ref = Ref(node.id, "", self.id, name, incarnation, self)
        self.mailbox = Mailbox(capacity)
        self.watchers = Watchers(self.ref)
        self.watched = False
        self._bonds: Bonds | None = None
        self.exit: ExitReason | None = None
        self.ended: asyncio.Future[ExitReason] = node.loop.create_future()
        self.table = table
        self._handlers = table.by_type
        self._current: Envelope | None = None
        self._loop = node.loop

    # --- what a Ref offers ----------------------------------------------------------------------

    async def ask(self, ref: Ref, message: Message, timeout_s: float) -> Any:
        handler = self._handlers.get(type(message)) or self._unhandled(message)
        loop = self._loop
        current = CURRENT.get()
        chain: Chain = ()
        cause = waiter = 0
        far: Far = ()
        if current is None:
            deadline = loop.time() + timeout_s
        else:
            deadline = deadline_of(current, loop.time(), timeout_s)
            cause = current.id
            chain = current.chain_from_here()
            if chain and handler.exclusive:
                if self._current is not None:
                    far = self.node.waits.check(chain, self)
                waiter = chain[-1].message_id
                if waiter in (waiting := self.node.waits.first):
                    self.node.waits.add(waiter, self)
                else:
                    waiting[waiter] = self
        try:
            if self.exit is None and self.mailbox.full():
                otherwise = AskTimeout(ref.label, type(message).__name__, timeout_s)
                await self._wait_for_room(deadline, otherwise)
            if self.exit is not None:
                raise ActorDied(ref, self.exit)
            answer = loop.create_future()
            id = self.node.new_id()
            envelope = Envelope(message, handler, self, id, cause, answer, chain, deadline, timeout_s)
            self.node.deadlines.add(envelope, deadline)
            self.put(envelope)
            if far:
                self.node.waits.seek(far, chain, self.id, id)
            try:
                return await answer
            except asyncio.CancelledError:
                envelope.cancel()
                raise
            finally:
                self.node.deadlines.discard(envelope)
        finally:
            if waiter:
                self.node.waits.discard(waiter, self)

    async def tell(self, ref: Ref, message: Message, timeout_s: float) -> None:
        handler = self._handlers.get(type(message)) or self._unhandled(message)
        current = CURRENT.get()
        # An actor that tells itself would wait for its own handler.
        if self.mailbox.full() and self.exit is None and (current is None or current.life is not self):
            deadline = deadline_of(current, self._loop.time(), timeout_s)
            await self._wait_for_room(deadline, MailboxFull(ref.label, timeout_s))
        if self.exit is not None:
            self.node.dead_letter(ref, wire_name(type(message)), self.exit)
            return
        cause = 0 if current is None else current.id
        self.put(Envelope(message, handler, self, self.node.new_id(), cause))

    def has_room(self, ref: Ref) -> bool:
        """A message that is sent now waits for nobody."""
        return self.exit is not None or not self.mailbox.full()

    def stream(self, ref: Ref, message: Message, position: int) -> ItemStream[Any]:
        return ItemStream(partial(self._open_stream, ref, message, position), position)

    async def _open_stream(self, ref: Ref, message: Message, position: int) -> Pipe:
        handler = self._handlers.get(type(message)) or self._unhandled(message)
        current = CURRENT.get()
        if self.mailbox.full() and self.exit is None:
            deadline = deadline_of(current, self._loop.time(), ASK_TIMEOUT_S)
            await self._wait_for_room(deadline, MailboxFull(ref.label, ASK_TIMEOUT_S))
        if self.exit is not None:
            raise ActorDied(ref, self.exit)
        cause, chain = (0, ()) if current is None else (current.id, current.chain_from_here())
        pipe = Pipe(position)
        envelope = Envelope(message, handler, self, self.node.new_id(), cause, pipe, chain)
        pipe.cancel = envelope.cancel
        self.put(envelope)
        return pipe

    def watch(self, ref: Ref, watcher: LocalTarget) -> None:
        if self.ended.done():
            watcher.deliver(Down(ref=ref, reason=self.ended.result()))
        else:
            self.watchers.add(watcher.id, watcher.deliver)

    def unwatch(self, ref: Ref, watcher: LocalTarget) -> None:
        self.watchers.discard(watcher.id)

    def tie(self, ref: Ref, other: LocalTarget) -> None:
        self.watch(ref, other)
        if not self.ended.done():
            self.bonds.tied(other.ref)

    def untie(self, ref: Ref, other: LocalTarget) -> None:
        if self._bonds is not None:
            self._bonds.untied(other.ref)

    # --- monitors and links ---------------------------------------------------------------------

    def monitor(self, ref: Ref) -> None:
        if Down not in self._handlers:
            raise TypeError(f"{self.table.actor} monitors {ref.label} but does not handle Down")
        self.bonds.monitor(ref)

    def stop_watching(self, reason: ExitReason) -> None:
        """It is gone: it monitors nobody, and whoever monitors it learns why."""
        bonds, self._bonds = self._bonds, None
        if bonds is not None:
            bonds.close()
        self.watchers.tell(reason)

    @property
    def bonds(self) -> Bonds:
        if self._bonds is None:
            self._bonds = Bonds(self)
        return self._bonds

    # --- what a link, a parent or a node needs --------------------------------------------------

    def use(self, table: HandlerTable) -> None:
        """From now on messages come with the methods of that table."""
        self.table = table
        self._handlers = table.by_type

    def put(self, envelope: Envelope) -> None:
        """Takes a message, room or not."""
        raise NotImplementedError

    def put_system(self, envelope: Envelope) -> None:
        """Takes a message of the runtime's own."""
        raise NotImplementedError

    def crash(self, reason: ExitReason) -> None:
        """It ends because of something outside its handlers."""
        raise NotImplementedError

    def cancel(self, envelope: Envelope) -> None:
        """The asker of a message that was put is gone."""
        raise NotImplementedError

    def deliver(self, message: Tell) -> None:
        """A message of the runtime's own; ignored by an actor that does not handle it."""
        if isinstance(message, Down) and self._bonds is not None and not self._bonds.over(message):
            return
        handler = self._handlers.get(type(message))
        if handler is not None and self.exit is None:
            self.put_system(Envelope(message, handler, self, self.node.new_id(), 0))

    def end_waiting(self, ask_id: int, error: WouldDeadlock) -> None:
        """An ask that waits in the mailbox ends with `error`."""
        for envelope in self.mailbox.queue or ():
            if envelope.id == ask_id and envelope.answer is not None and not envelope.answer.done():
                envelope.answer.set_exception(error)
                envelope.cancel()

    @property
    def current(self) -> Envelope | None:
        """The message that its exclusive handler is at."""
        return self._current

    async def _wait_for_room(self, deadline: float, otherwise: Exception) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                while self.mailbox.full() and self.exit is None:
                    await self.mailbox.room()
        except TimeoutError:
            raise otherwise from None

    def _unhandled(self, message: Message) -> Handler:
        raise UnhandledMessage(self.table.actor, wire_name(type(message)), self.table.names())
