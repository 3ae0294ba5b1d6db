"""Answers on their way to an asker in another process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gyre.actors.errors import ActorDied, BadMessage, Failure, RemoteError
from gyre.actors.streams import WINDOW_ITEMS
from gyre.actors.wire import Body, End, Failed, Item, Reply

if TYPE_CHECKING:
    from gyre.actors.envelope import Envelope
    from gyre.actors.link import Link


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
        self._link.incoming.pop(self.id, None)

    def set_exception(self, error: BaseException) -> None:
        self._link.fail(self.id, failure_of(error))

    def credit(self, items: int) -> None:
        """Only a stream's consumer gives credit."""


class RemoteSink(RemoteAnswer):
    """The items of a stream that a peer consumes; sends no more than it has credit for."""

    __slots__ = ("_credit", "_position", "_waiter")

    def __init__(self, link: Link, id: int, position: int) -> None:
        super().__init__(link, id)
        self._credit = WINDOW_ITEMS
        self._position = position
        self._waiter: asyncio.Future[None] | None = None

    async def put(self, item: Any) -> None:
        while self._credit <= 0:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._link.writable:
            await self._link.drain()
        self._credit -= 1
        body: Body = item
        self._link.send(Item(0, self.id, self._position, body))
        self._position += 1

    def credit(self, items: int) -> None:
        self._credit += items
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self) -> None:
        if self._link.incoming.pop(self.id, None) is not None:
            self._link.send(End(0, self.id))

    def fail(self, error: BaseException) -> None:
        self.set_exception(error)
