"""Where a Ref leads when its actor is elsewhere, or nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.msgpack import Decoder

from gyre.actors.deadlines import Expiring
from gyre.actors.envelope import CURRENT, deadline_of
from gyre.actors.errors import (
    ActorDied,
    AskTimeout,
    BadMessage,
    ExitReason,
    Failure,
    MailboxFull,
)
from gyre.actors.messages import Down, Message, wire_name
from gyre.actors.ref import ASK_TIMEOUT_S, Ref
from gyre.actors.streams import WINDOW_ITEMS, ItemStream, Pipe
from gyre.actors.wire import ASK, STREAM, TELL, UNDECODABLE, Body, Demand, Seek, Tie

if TYPE_CHECKING:
    from gyre.actors.link import Link
    from gyre.actors.local import LocalTarget
    from gyre.actors.node import Node


class PendingAsk(msgspec.Struct, eq=False):
    """An ask that waits for its reply. A Struct for speed, as an Envelope is."""

    id: int
    answer: asyncio.Future[Any]
    _link: Link
    _ref: Ref
    _message: Message
    _decoder: Decoder[Any]
    _timeout_s: float
    slot: dict[Expiring, None] | None = None

    @property
    def label(self) -> str:
        return self._ref.label

    def expire(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(_timeout(self._ref, self._message, self._timeout_s))
            self._link.pending.pop(self.id, None)
            self._link.cancel(self.id)

    def seek(self, frame: Seek) -> None:
        self._link.send(frame)

    def reply(self, body: Body) -> None:
        if self.answer.done():
            return
        try:
            self.answer.set_result(self._decoder.decode(body))
        except UNDECODABLE as error:
            self.answer.set_exception(_bad_answer(self._ref, self._message, error))

    def fail(self, failure: Failure) -> None:
        if not self.answer.done():
            self.answer.set_exception(failure.error(self._ref))


class PendingStream:
    """A stream that is being consumed; gives the producer credit by the half window."""

    __slots__ = (
        "_decoder",
        "_link",
        "_loads",
        "_message",
        "_ref",
        "_taken",
        "_taken_position",
        "id",
        "pipe",
        "position",
    )

    def __init__(
        self, link: Link, ref: Ref, id: int, message: Message, decoder: Decoder[Any], position: int
    ) -> None:
        self.id = id
        self.position = position
        self.pipe = Pipe(position)
        self.pipe.cancel = self._cancel
        self.pipe.on_taken = self._on_taken
        self._link = link
        self._ref = ref
        self._message = message
        self._decoder = decoder
        self._taken = 0
        self._taken_position = position
        self._loads: dict[int, Callable[[], None]] = {}

    def item(self, position: int, body: Body) -> None:
        if position != self.position:
            raise BadMessage(f"item {position} of a stream where {self.position} belongs")
        self.position += 1
        try:
            self.pipe.push(self._decoder.decode(body))
        except UNDECODABLE as error:
            self.pipe.fail(_bad_answer(self._ref, self._message, error))
            self._cancel()

    def loaded(self, position: int, taken: Callable[[], None]) -> bool:
        """Whether that item waits; `taken` is called when it does no more."""
        if self.pipe.ended:
            return False
        self._loads[position] = taken
        return True

    def end(self) -> None:
        self._unlink()
        self.pipe.end()

    def fail(self, failure: Failure) -> None:
        self._unlink()
        self.pipe.fail(failure.error(self._ref))

    def _unlink(self) -> None:
        self._link.pending.pop(self.id, None)
        self._link.freight.incoming.forget_stream(self.id)

    def _on_taken(self) -> None:
        taken = self._loads.pop(self._taken_position, None)
        self._taken_position += 1
        if taken is not None:
            taken()
        self._taken += 1
        if self._taken >= WINDOW_ITEMS // 2 and not self.pipe.ended:
            self._link.send(Demand(0, self.id, self._taken))
            self._taken = 0

    def _cancel(self) -> None:
        if self._link.pending.pop(self.id, None) is not None:
            self._link.cancel(self.id)


class RemoteTarget:
    """An actor of another node, reached over the one link to it, which is made when first needed."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def encode(self, message: Message) -> Body | None:
        """For all who are sent it: `encoded` below. None where it has blobs: each link has its own numbers
        for them. BadMessage."""
        codec = self._node.codec
        body = codec.encode(message)
        return None if codec.take_blobs() else Body(body)

    def has_room(self, ref: Ref) -> bool:
        return self._node.links.to(ref).has_room(ref.id)

    async def ask(self, ref: Ref, message: Message, timeout_s: float, encoded: Body | None = None) -> Any:
        node = self._node
        loop = node.loop
        current = CURRENT.get()
        now = loop.time()
        deadline = deadline_of(current, now, timeout_s)
        decoder = node.codec.answers(type(message))
        link = node.links.to(ref)
        if not link.has_room(ref.id):
            try:
                await self._room(link, ref, deadline)
            except TimeoutError:
                raise _timeout(ref, message, timeout_s) from None
            now = loop.time()
        if link.gone is not None:
            raise ActorDied(ref, link.gone)
        id, answer = node.new_id(), loop.create_future()
        link.request(ASK, id, ref, message, current, deadline - now, 0, encoded)
        pending = link.pending[id] = PendingAsk(id, answer, link, ref, message, decoder, timeout_s)
        node.deadlines.add(pending, deadline)
        waiter = 0 if current is None else current.waiter
        if waiter:
            node.waits.add_far(waiter, pending)
        try:
            return await answer
        except asyncio.CancelledError:
            link.pending.pop(id, None)
            link.cancel(id)
            raise
        finally:
            node.deadlines.discard(pending)
            if waiter:
                node.waits.discard_far(waiter, pending)

    async def tell(self, ref: Ref, message: Message, timeout_s: float, encoded: Body | None = None) -> None:
        node = self._node
        current = CURRENT.get()
        link = node.links.to(ref)
        if not link.has_room(ref.id):
            try:
                await self._room(link, ref, deadline_of(current, node.loop.time(), timeout_s))
            except TimeoutError:
                raise MailboxFull(ref.label, timeout_s) from None
        if link.gone is not None:
            node.dead_letter(ref, wire_name(type(message)), link.gone)
            return
        id = node.new_id()
        link.request(TELL, id, ref, message, current, None, 0, encoded)
        if link.unshipped:
            await self._left(link, ref, id, deadline_of(current, node.loop.time(), timeout_s), timeout_s)

    def stream(self, ref: Ref, message: Message, position: int) -> ItemStream[Any]:
        return ItemStream(partial(self._open, ref, message, position), position)

    async def _open(self, ref: Ref, message: Message, position: int) -> Pipe:
        node = self._node
        current = CURRENT.get()
        decoder = node.codec.answers(type(message))
        link = node.links.to(ref)
        if not link.has_room(ref.id):
            try:
                await self._room(link, ref, deadline_of(current, node.loop.time(), ASK_TIMEOUT_S))
            except TimeoutError:
                raise MailboxFull(ref.label, ASK_TIMEOUT_S) from None
        if link.gone is not None:
            raise ActorDied(ref, link.gone)
        pending = PendingStream(link, ref, node.new_id(), message, decoder, position)
        link.request(STREAM, pending.id, ref, message, current, None, position)
        link.pending[pending.id] = pending
        return pending.pipe

    def watch(self, ref: Ref, watcher: LocalTarget) -> None:
        link = self._node.links.to(ref)
        if link.gone is not None:
            watcher.deliver(Down(ref=ref, reason=link.gone))
        else:
            link.watch(ref, watcher)

    def unwatch(self, ref: Ref, watcher: LocalTarget) -> None:
        link = self._node.links.get(ref.node_id)
        if link is not None:
            link.unwatch(ref, watcher)

    def tie(self, ref: Ref, other: LocalTarget) -> None:
        self.watch(ref, other)
        self._node.links.to(ref).send(Tie(0, ref.id, other.id, other.ref.name, other.ref.incarnation, True))

    def untie(self, ref: Ref, other: LocalTarget) -> None:
        link = self._node.links.get(ref.node_id)
        if link is not None:
            link.send(Tie(0, ref.id, other.id, other.ref.name, other.ref.incarnation, False))

    async def _left(self, link: Link, ref: Ref, id: int, deadline: float, timeout_s: float) -> None:
        """Until the blobs of a message are there, so that a writer is no faster than its reader; where they
        have not even left in time, it is withdrawn."""
        outgoing = link.freight.outgoing
        try:
            async with asyncio.timeout_at(deadline):
                await outgoing.left(id)
        except TimeoutError:
            if outgoing.waits_to_leave(id):
                link.cancel(id)
                raise MailboxFull(ref.label, timeout_s) from None
        except asyncio.CancelledError:
            link.cancel(id)
            raise

    async def _room(self, link: Link, ref: Ref, deadline: float) -> None:
        async with asyncio.timeout_at(deadline):
            await link.room(ref.id)


class Nowhere:
    """The target of a Ref to a life that this node has had and has no more."""

    __slots__ = ("_node", "_reason")

    def __init__(self, node: Node, reason: ExitReason) -> None:
        self._node = node
        self._reason = reason

    async def ask(self, ref: Ref, message: Message, timeout_s: float) -> Any:
        raise ActorDied(ref, self._reason)

    async def tell(self, ref: Ref, message: Message, timeout_s: float) -> None:
        self._node.dead_letter(ref, wire_name(type(message)), self._reason)

    def has_room(self, ref: Ref) -> bool:
        return True

    def stream(self, ref: Ref, message: Message, position: int) -> ItemStream[Any]:
        return ItemStream(partial(self._no_stream, ref), position)

    async def _no_stream(self, ref: Ref) -> Pipe:
        raise ActorDied(ref, self._reason)

    def watch(self, ref: Ref, watcher: LocalTarget) -> None:
        watcher.deliver(Down(ref=ref, reason=self._reason))

    def unwatch(self, ref: Ref, watcher: LocalTarget) -> None:
        return

    def tie(self, ref: Ref, other: LocalTarget) -> None:
        self.watch(ref, other)

    def untie(self, ref: Ref, other: LocalTarget) -> None:
        return


def _timeout(ref: Ref, message: Message, timeout_s: float) -> AskTimeout:
    return AskTimeout(ref.label, type(message).__name__, timeout_s)


def _bad_answer(ref: Ref, message: Message, error: Exception) -> BadMessage:
    return BadMessage(f"what {ref.label} answered to {type(message).__name__} is not its type: {error}")
