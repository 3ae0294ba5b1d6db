"""Looks at what has been read, where the backend cannot look while it arrives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gyre.rdma.base import Extent, Look


class Looks:
    """In a thread of somebody else's, one read after the other."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread

    async def at(self, extents: Sequence[Extent], look: Look, deadline: float) -> bool:
        """False where the time of the loop was over. Raises what a look raises. However it ends, nobody
        looks any more."""
        unwanted = threading.Event()
        work = self._thread.submit(_look_at, extents, look, unwanted)
        looking = asyncio.wrap_future(work)
        try:
            async with asyncio.timeout_at(deadline) as limit:
                await asyncio.shield(looking)
        except TimeoutError:
            if not limit.expired():
                raise
            return False
        finally:
            unwanted.set()
            if not work.cancel():
                await asyncio.wait({looking})
        return True


def _look_at(extents: Sequence[Extent], look: Look, unwanted: threading.Event) -> None:
    for at, _, nbytes in extents:
        for start in range(at, at + nbytes, look.nbytes):
            if unwanted.is_set():
                return
            look.at(start)
