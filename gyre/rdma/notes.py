"""What peers have told, until it is taken."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from gyre.rdma.base import Note

# More of them wait at their senders.
NOTES = 1024


class Notes:
    """A bounded queue that ends."""

    def __init__(self) -> None:
        self._notes: deque[Note] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    async def put(self, note: Note) -> None:
        """Waits for room."""
        while len(self._notes) >= NOTES and not self._closed:
            await self._changed.wait()
        self._notes.append(note)
        self._change()

    async def taken(self) -> AsyncIterator[Note]:
        while not self._closed:
            while self._notes:
                yield self._notes.popleft()
                self._change()
            if not self._closed:
                await self._changed.wait()

    def close(self) -> None:
        self._closed = True
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
