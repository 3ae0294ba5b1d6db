"""Streams that go on at another actor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from gyre.actors.errors import ActorDied, Moved
from gyre.actors.messages import Stream
from gyre.actors.ref import Ref
from gyre.actors.streams import ItemStream

I = TypeVar("I")  # noqa: E741  Item


class Resumed(Generic[I], AsyncIterator[I]):
    """The items of one stream, whoever produces them: iterate once, close with `aclose()`. `position` is
    that of the next item, `ref` the actor that has produced last."""

    def __init__(
        self, locate: Callable[[Ref | None], Awaitable[Ref]], message: Stream[I], position: int
    ) -> None:
        self._locate = locate
        self._message = message
        self._items: ItemStream[I] | None = None
        self._began = position
        self._closed = False
        self.position = position
        self.ref: Ref | None = None

    def __aiter__(self) -> Resumed[I]:
        return self

    async def __anext__(self) -> I:
        while not self._closed:
            try:
                item = await anext(self._items or await self._open(None))
            except (ActorDied, Moved) as error:
                self._items = None
                await self._open(error)
            else:
                self.position += 1
                return item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancels the handler if it still runs."""
        self._closed = True
        if self._items is not None:
            await self._items.aclose()

    async def _open(self, error: ActorDied | Moved | None) -> ItemStream[I]:
        """At whoever goes on. One that gave nothing is not asked twice."""
        left, self.ref = self.ref, await self._locate(self.ref)
        if error is not None and self.ref == left and self.position == self._began:
            raise error
        self._began = self.position
        self._items = self.ref.stream(self._message, self.position)
        return self._items


def resumed(
    locate: Callable[[Ref | None], Awaitable[Ref]], message: Stream[I], position: int = 0
) -> Resumed[I]:
    """The items of `message` from `position` on, none lost and none twice, while the actors that produce them
    die or raise `Moved`. `locate` is given the actor that has left, None at first, and answers who goes on,
    as `lambda left: supervisor.ask(AwaitChild(name="engine", after=left))` does. The same one may (only the
    connection was lost); where it gives nothing then, its error is raised. All must have the same items at
    the same positions."""
    return Resumed(locate, message, position)
