"""An event loop in a thread: for what must neither wait for the loop that asks, nor keep it waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Starts when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        return self._thread is not None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What it brings. Cancelled, it cancels the work there, and returns when that is over."""
        there = self._started()
        here = asyncio.get_running_loop()
        over: asyncio.Future[asyncio.Task[T]] = here.create_future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(there.create_task(work))
            tasks[0].add_done_callback(tell)

        def tell(done: asyncio.Task[T]) -> None:
            if not done.cancelled():
                done.exception()  # where nobody waits any more it is nobody's
            here.call_soon_threadsafe(over.set_result, done)

        there.call_soon_threadsafe(begin)
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError:
            there.call_soon_threadsafe(lambda: tasks[0].cancel())
            await asyncio.wait({over})
            raise
        return over.result().result()

    async def close(self) -> None:
        """What runs there must be over."""
        if self._loop is not None and self._thread is not None:
            await self.run(self._loop.shutdown_default_executor())
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
            self._loop.close()
            self._loop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            import uvloop  # slow to import, and few processes come here

            self._loop = uvloop.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
            self._thread.start()
        return self._loop
