"""Where a Ref leads when its actor is elsewhere, or nowhere."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from gyre.actors.deadlines import Expiring
from gyre.actors.envelope import CURRENT, deadline_of
from gyre.actors.errors import ActorDied, AskTimeout, BadMessage, ExitReason, Failure, MailboxFull
from gyre.actors.messages import Down, Message, answer_type, wire_name
from gyre.actors.ref import ASK_TIMEOUT_S, Ref
from gyre.actors.streams import WINDOW_ITEMS, ItemStream, Pipe
from gyre.actors.wire import ASK, STREAM, TELL, Body, Demand

if TYPE_CHECKING:
    from gyre.actors.link import Link
    from gyre.actors.local import LocalTarget
    from gyre.actors.node import Node


class PendingAsk:
    """An ask that waits for its reply."""

    __slots__ = ("_answer", "_link", "_message", "_ref", "_timeout_s", "id", "slot")

    def __init__(self, link: Link, ref: Ref, id: int, message: Message, timeout_s: float) -> None:
        self.id = id
        self.slot: dict[Expiring, None] | None = None
        self._link = link
        self._ref = ref
        self._message = type(message)
        self._timeout_s = timeout_s
        self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def wait(self, deadline: float) -> Any:
        deadlines = self._link.node.deadlines
        deadlines.add(self, deadline)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self._link.cancel(self.id)
            raise
        finally:
            deadlines.discard(self)
            self._link.pending.pop(self.id, None)

    def expire(self) -> None:
        if not self._answer.done():
            self._answer.set_exception(AskTimeout(self._ref.label, self._message.__name__, self._timeout_s))
            self._link.cancel(self.id)

    def reply(self, body: Body) -> None:
        if self._answer.done():
            return
        try:
            self._answer.set_result(self._link.node.codec.decode(answer_type(self._message), body))
        except BadMessage as error:
            self._answer.set_exception(BadMessage(f"{self._ref.label} to {self._message.__name__}: {error}"))

    def fail(self, failure: Failure) -> None:
        if not self._answer.done():
            self._answer.set_exception(failure.error(self._ref))


class PendingStream:
    """A stream that is being consumed; gives the producer credit by the half window."""

    __slots__ = ("_link", "_message", "_ref", "_taken", "id", "pipe", "position")

    def __init__(self, link: Link, ref: Ref, id: int, message: Message) -> None:
        self.id = id
        self.position = 0
        self.pipe = Pipe()
        self.pipe.cancel = self._cancel
        self.pipe.on_taken = self._on_taken
        self._link = link
        self._ref = ref
        self._message = type(message)
        self._taken = 0

    def item(self, position: int, body: Body) -> None:
        if position != self.position:
            raise BadMessage(f"item {position} of a stream where {self.position} belongs")
        self.position += 1
        try:
            self.pipe.push(self._link.node.codec.decode(answer_type(self._message), body))
        except BadMessage as error:
            self.pipe.fail(BadMessage(f"{self._ref.label} to {self._message.__name__}: {error}"))
            self._cancel()

    def end(self) -> None:
        self._link.pending.pop(self.id, None)
        self.pipe.end()

    def fail(self, failure: Failure) -> None:
        self._link.pending.pop(self.id, None)
        self.pipe.fail(failure.error(self._ref))

    def _on_taken(self) -> None:
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

    async def ask(self, ref: Ref, message: Message, timeout_s: float) -> Any:
        node = self._node
        node.codec.decoder(answer_type(type(message)))
        current = CURRENT.get()
        deadline = deadline_of(current, node.loop.time(), timeout_s)
        otherwise = AskTimeout(ref.label, type(message).__name__, timeout_s)
        link = await self._link(ref, deadline, otherwise)
        pending = PendingAsk(link, ref, node.new_id(), message, timeout_s)
        link.request(ASK, pending.id, ref, message, current, deadline - node.loop.time(), pending)
        return await pending.wait(deadline)

    async def tell(self, ref: Ref, message: Message, timeout_s: float) -> None:
        node = self._node
        current = CURRENT.get()
        deadline = deadline_of(current, node.loop.time(), timeout_s)
        try:
            link = await self._link(ref, deadline, MailboxFull(ref.label, timeout_s))
        except ActorDied:
            node.dead_letter(ref, wire_name(type(message)))
            return
        link.request(TELL, node.new_id(), ref, message, current, None, None)

    def stream(self, ref: Ref, message: Message) -> ItemStream[Any]:
        return ItemStream(partial(self._open, ref, message))

    async def _open(self, ref: Ref, message: Message) -> Pipe:
        node = self._node
        node.codec.decoder(answer_type(type(message)))
        current = CURRENT.get()
        deadline = deadline_of(current, node.loop.time(), ASK_TIMEOUT_S)
        link = await self._link(ref, deadline, MailboxFull(ref.label, ASK_TIMEOUT_S))
        pending = PendingStream(link, ref, node.new_id(), message)
        link.request(STREAM, pending.id, ref, message, current, None, pending)
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

    async def _link(self, ref: Ref, deadline: float, otherwise: Exception) -> Link:
        """The link, once it and the mailbox at its other end have room."""
        link = self._node.links.to(ref)
        if not link.has_room(ref.id):
            try:
                async with asyncio.timeout_at(deadline):
                    await link.room(ref.id)
            except TimeoutError:
                raise otherwise from None
        if link.gone is not None:
            raise ActorDied(ref, link.gone)
        return link


class Nowhere:
    """The target of a Ref to a life that this node has had and has no more."""

    __slots__ = ("_node", "_reason")

    def __init__(self, node: Node, reason: ExitReason) -> None:
        self._node = node
        self._reason = reason

    async def ask(self, ref: Ref, message: Message, timeout_s: float) -> Any:
        raise ActorDied(ref, self._reason)

    async def tell(self, ref: Ref, message: Message, timeout_s: float) -> None:
        self._node.dead_letter(ref, wire_name(type(message)))

    def stream(self, ref: Ref, message: Message) -> ItemStream[Any]:
        return ItemStream(partial(self._no_stream, ref))

    async def _no_stream(self, ref: Ref) -> Pipe:
        raise ActorDied(ref, self._reason)

    def watch(self, ref: Ref, watcher: LocalTarget) -> None:
        watcher.deliver(Down(ref=ref, reason=self._reason))

    def unwatch(self, ref: Ref, watcher: LocalTarget) -> None:
        return
