"""Serving what a peer asks: the request into a mailbox, the answer on its way back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gyre.actors.envelope import Envelope, Origin
from gyre.actors.errors import ActorDied, BadMessage, Failure, RemoteError, UnhandledMessage, WouldDeadlock
from gyre.actors.messages import Ask, Stream, Tell
from gyre.actors.streams import WINDOW_ITEMS
from gyre.actors.wire import ASK, STREAM, TELL, Body, End, Failed, Item, Reply, Request, Taken

if TYPE_CHECKING:
    from gyre.actors.life import Life
    from gyre.actors.link import Link


_KINDS = {TELL: Tell, ASK: Ask, STREAM: Stream}


def failure_of(error: BaseException) -> Failure:
    """What `as_seen_by_caller` made of a handler's error, or the death of its actor."""
    if isinstance(error, ActorDied):
        return Failure(reason=error.reason)
    if isinstance(error, RemoteError):
        return Failure(type_name=error.type_name, message=error.message, traceback=error.traceback)
    return Failure.of(error)


class RemoteAnswer:
    """The answer to an ask from a peer."""

    __slots__ = ("_link", "envelope", "id")

    def __init__(self, link: Link, id: int) -> None:
        self._link = link
        self.id = id
        self.envelope: Envelope | None = None

    def done(self) -> bool:
        return self.id not in self._link.incoming

    def set_result(self, result: Any) -> None:
        try:
            self._link.send(Reply(0, self.id, result))
        except BadMessage as error:
            self._link.send(Failed(0, self.id, Failure.of(error)))
        self._over()

    def set_exception(self, error: BaseException) -> None:
        self._link.fail(self.id, failure_of(error))
        self.envelope = None

    def _over(self) -> bool:
        """Whether it was not over before. The two hold each other: memory of a message goes with its answer,
        not when garbage is next collected."""
        self.envelope = None
        return self._link.incoming.pop(self.id, None) is not None

    def cancel(self) -> None:
        """Its asker is gone."""
        envelope, self.envelope = self.envelope, None
        if envelope is not None:
            envelope.cancel()

    def credit(self, items: int) -> None:
        """Only a stream's consumer gives credit."""


class RemoteSink(RemoteAnswer):
    """The items of a stream that a peer consumes; sends no more than it has credit for."""

    __slots__ = ("_credit", "_position", "_waiter", "start")

    def __init__(self, link: Link, id: int, position: int) -> None:
        super().__init__(link, id)
        self._credit = WINDOW_ITEMS
        self.start = self._position = position
        self._waiter: asyncio.Future[None] | None = None

    async def put(self, item: Any) -> None:
        while self._credit <= 0:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._link.writable:
            await self._link.drain()
        self._credit -= 1
        body: Body = item
        link = self._link
        link.send(Item(0, self.id, self._position, body))
        self._position += 1
        if link.unshipped:
            await link.freight.outgoing.left(self.id)

    def credit(self, items: int) -> None:
        # Never more than a window: a producer with more might not let the loop run.
        self._credit = min(self._credit + items, WINDOW_ITEMS)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self) -> None:
        if self._over():
            self._link.send(End(0, self.id))

    def fail(self, error: BaseException) -> None:
        self.set_exception(error)


def serve(link: Link, frame: Request, origin: Origin | None = None) -> bool:
    """Whether its actor has a peer's message now; if not, the peer is told why. `origin` is told when it has
    left the mailbox, in place of the link: that may be at once."""
    answer = None
    if frame.kind == ASK:
        answer = link.incoming[frame.id] = RemoteAnswer(link, frame.id)
    elif frame.kind == STREAM:
        answer = link.incoming[frame.id] = RemoteSink(link, frame.id, frame.position)
    node = link.node
    life = node.lives.get(frame.to) or node.life(frame.to)
    if life is None or life.exit is not None:
        reason = node.exit_of(frame.to) if life is None else life.exit
        link.send(Taken(0, frame.to, 1))
        link.fail(frame.id, Failure(reason=reason))
        if frame.kind == TELL:
            node.dead_letters.add(f"actor {frame.to}", frame.type, str(reason))
        return False
    try:
        envelope = _envelope(link, frame, life, answer, origin or link)
    except (BadMessage, UnhandledMessage, WouldDeadlock) as error:
        link.send(Taken(0, frame.to, 1))
        if frame.kind == TELL:
            node.dead_letters.add(life.ref.label, frame.type, str(error))
        else:
            link.fail(frame.id, Failure.of(error))
        return False
    if answer is not None:
        answer.envelope = envelope
    # Of several that came together the actor's task handles all in one go.
    if link.single:
        life.put_at_once(envelope)
    else:
        life.put(envelope)
    return True


def _envelope(
    link: Link, frame: Request, life: Life, answer: RemoteAnswer | None, origin: Origin
) -> Envelope:
    handler = life.table.by_name.get(frame.type)
    if handler is None:
        raise UnhandledMessage(life.table.actor, frame.type, life.table.names())
    if handler.kind is not _KINDS.get(frame.kind):
        raise BadMessage(f"{frame.type} was sent as another kind of message")
    if frame.chain and handler.exclusive:
        waits = link.node.waits
        waits.seek(waits.check(frame.chain, life), frame.chain, life.id, frame.id)
    node, left_s = link.node, frame.left_s
    message = node.codec.decode(handler.message, frame.body)
    deadline = None if left_s is None else node.loop.time() + left_s
    return Envelope(
        message, handler, life, frame.id, frame.cause, answer, frame.chain, deadline, left_s or 0.0, origin
    )
