"""A handler that began before the task that goes on with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class Begun:
    """A coroutine that has run up to the first thing it waits for. Awaited once, by the task it was told to
    be of, it goes on as if that task had run it from its start."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for  # what it yielded: a future, or None to let others run

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, waits_for = self._coroutine, self._waits_for
        try:
            while True:
                try:
                    value = yield waits_for
                except BaseException as error:
                    waits_for = coroutine.throw(error)
                else:
                    waits_for = coroutine.send(value)
        except StopIteration as end:
            return end.value


def begin(coroutine: Coroutine[Any, Any, Any], task: asyncio.Task[Any]) -> Begun:
    """Runs it, as if by `task`, which waits, up to the first thing that it waits for. Raises what it raises,
    and StopIteration with what it returned where it waits for nothing. To be called by no task."""
    loop = task.get_loop()
    asyncio.tasks._enter_task(loop, task)
    try:
        return Begun(coroutine, coroutine.send(None))
    finally:
        asyncio.tasks._leave_task(loop, task)
