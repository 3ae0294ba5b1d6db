"""Streams: a handler's items on their way to one consumer, at its pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

I = TypeVar("I")  # noqa: E741  Item

WINDOW_ITEMS = 32


class Sink(Protocol):
    """Where a stream's handler puts its items. `start` is the position that the consumer wants first."""

    @property
    def start(self) -> int: ...
    async def put(self, item: Any) -> None: ...
    def end(self) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class Pipe:
    """The consumer's end: items that came and were not taken yet, at most a window of them when the
    producer keeps to `put` or to the credit that `on_taken` gives back."""

    __slots__ = ("_consumer", "_ended", "_error", "_items", "_producer", "cancel", "on_taken", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self._items: deque[Any] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._consumer: asyncio.Future[None] | None = None
        self._producer: asyncio.Future[None] | None = None
        self.cancel: Callable[[], None] | None = None
        self.on_taken: Callable[[], None] | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    def push(self, item: Any) -> None:
        if not self._ended:
            self._items.append(item)
            _wake(self._consumer)

    async def put(self, item: Any) -> None:
        while len(self._items) >= WINDOW_ITEMS and not self._ended:
            self._producer = asyncio.get_running_loop().create_future()
            await self._producer
        self.push(item)

    def end(self) -> None:
        self._ended = True
        _wake(self._consumer)

    def fail(self, error: BaseException) -> None:
        if not self._ended:
            self._error = error
            self.end()

    def done(self) -> bool:
        return self._ended

    def set_result(self, _: Any) -> None:
        self.end()

    def set_exception(self, error: BaseException) -> None:
        self.fail(error)

    async def take(self) -> Any:
        """The next item; StopAsyncIteration at the end, or what the handler raised."""
        while not self._items:
            if self._ended:
                error, self._error = self._error, None
                raise error or StopAsyncIteration
            self._consumer = asyncio.get_running_loop().create_future()
            await self._consumer
        item = self._items.popleft()
        _wake(self._producer)
        if self.on_taken is not None:
            self.on_taken()
        return item

    def close(self) -> None:
        """The consumer is gone."""
        self._items.clear()
        if not self._ended:
            self.end()
            if self.cancel is not None:
                self.cancel()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class ItemStream(Generic[I], AsyncIterator[I]):
    """The items of `ref.stream(...)`: iterate once, close with `aclose()` (or `contextlib.aclosing`).
    One that is dropped unfinished closes itself. `position` is that of the next item."""

    __slots__ = ("_closed", "_open", "_pipe", "position")

    def __init__(self, open: Callable[[], Awaitable[Pipe]], position: int) -> None:
        self._open = open
        self._pipe: Pipe | None = None
        self._closed = False
        self.position = position

    def __aiter__(self) -> ItemStream[I]:
        return self

    async def __anext__(self) -> I:
        if self._closed:
            raise StopAsyncIteration
        try:
            if self._pipe is None:
                self._pipe = await self._open()
            item: I = await self._pipe.take()
        except BaseException:
            self._close()
            raise
        self.position += 1
        return item

    async def aclose(self) -> None:
        """Cancels the handler if it still runs."""
        self._close()

    def _close(self) -> None:
        self._closed = True
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def __del__(self) -> None:
        if not self._closed and self._pipe is not None:
            self._pipe.close()
