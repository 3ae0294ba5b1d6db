"""What waits to be handled by one actor."""

from __future__ import annotations

import asyncio
from collections import deque

from gyre.actors.envelope import Envelope


class Mailbox:
    """A bounded lane of messages and an unbounded one of the system's own, which goes first. One reader, with
    one wake-up future; writers that find it full wait in order."""

    __slots__ = ("_reader", "_writers", "capacity", "queue", "running", "system")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: deque[Envelope] = deque()
        self.system: deque[Envelope] | None = None
        self.running = 0
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] | None = None

    def full(self) -> bool:
        """Concurrent handlers that run (`running`) count as if they still waited."""
        return len(self.queue) + self.running >= self.capacity

    def put(self, envelope: Envelope) -> None:
        """Appends, bound or not: a writer that must keep the bound waits for room first."""
        self.queue.append(envelope)
        if self._reader is not None:
            self.wake()

    def put_system(self, envelope: Envelope) -> None:
        if self.system is None:
            self.system = deque()
        self.system.append(envelope)
        self.wake()

    def wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def take(self) -> Envelope:
        """The next to handle; there must be one."""
        if self.system:
            return self.system.popleft()
        if self._writers is not None:
            self.give_room()
        return self.queue.popleft()

    async def wait(self) -> None:
        """Until something is put, or `wake`."""
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def give_room(self) -> None:
        """Lets the writer that waits longest look again."""
        while self._writers:
            writer = self._writers.popleft()
            if not writer.done():
                writer.set_result(None)
                return
        self._writers = None

    async def room(self) -> None:
        """Until there was room for a moment: look again."""
        writer = asyncio.get_running_loop().create_future()
        if self._writers is None:
            self._writers = deque()
        self._writers.append(writer)
        try:
            await writer
        except asyncio.CancelledError:
            if writer.done() and not writer.cancelled():
                self.give_room()
            raise

    def close(self) -> list[Envelope]:
        """What waited; all writers look again."""
        left = [*self.queue]
        self.queue.clear()
        if self.system is not None:
            self.system.clear()
        for writer in self._writers or ():
            if not writer.done():
                writer.set_result(None)
        self._writers = None
        return left
