"""What an actor has under way besides its messages: its tasks and its timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class Timer:
    """A message to come; `cancel()` takes it back."""

    __slots__ = ("_handle", "_timers")

    def __init__(self, handle: asyncio.TimerHandle, timers: set[asyncio.TimerHandle]) -> None:
        self._handle = handle
        self._timers = timers
        timers.add(handle)

    def cancel(self) -> None:
        self._timers.discard(self._handle)
        self._handle.cancel()


class Background:
    """Ends with its actor; what a task raises goes to `fail`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fail: Callable[[BaseException], None]) -> None:
        self._loop = loop
        self._fail = fail
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: set[asyncio.TimerHandle] = set()

    def run(self, coroutine: Coroutine[Any, Any, T], name: str, context: Context) -> asyncio.Task[T]:
        task = self._loop.create_task(coroutine, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def after(self, delay_s: float, do: Callable[[], None]) -> Timer:
        def fire() -> None:
            self._timers.discard(handle)
            do()

        handle = self._loop.call_later(delay_s, fire)
        return Timer(handle, self._timers)

    @property
    def pending(self) -> int:
        return len(self._tasks) + len(self._timers)

    def cancel_timers(self) -> None:
        while self._timers:
            self._timers.pop().cancel()

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Those that end now."""
        self.cancel_timers()
        for task in self._tasks:
            task.cancel()
        return [*self._tasks]

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
