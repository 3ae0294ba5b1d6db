"""What waits to be handled by one actor."""

from __future__ import annotations

import asyncio
from collections import deque

from gyre.actors.envelope import Envelope


class Mailbox:
    """A bounded lane of messages and an unbounded one of the system's own, which goes first. Writers that
    find it full wait in order. An empty one is small: its lanes are made when there is something in them."""

    __slots__ = ("capacity", "queue", "running", "system", "writers")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: deque[Envelope] | None = None
        self.system: deque[Envelope] | None = None
        self.running = 0
        self.writers: deque[asyncio.Future[None]] | None = None

    def full(self) -> bool:
        """Concurrent handlers that run (`running`) count as if they still waited."""
        queue = self.queue
        return (self.running if queue is None else len(queue) + self.running) >= self.capacity

    def put(self, envelope: Envelope) -> None:
        """Appends, bound or not: a writer that must keep the bound waits for room first."""
        if self.queue is None:
            self.queue = deque()
        self.queue.append(envelope)

    def put_system(self, envelope: Envelope) -> None:
        if self.system is None:
            self.system = deque()
        self.system.append(envelope)

    def take(self) -> Envelope | None:
        """The next to handle."""
        if self.system is not None:
            envelope = self.system.popleft()
            if not self.system:
                self.system = None
            return envelope
        if not self.queue:
            return None
        self.give_room()
        return self.queue.popleft()

    def open(self) -> deque[Envelope]:
        """The lane of messages, the same until `shrink`."""
        if self.queue is None:
            self.queue = deque()
        return self.queue

    def give_room(self) -> None:
        """Lets the writer that waits longest look again."""
        while self.writers:
            writer = self.writers.popleft()
            if not writer.done():
                writer.set_result(None)
                return
        self.writers = None

    async def room(self) -> None:
        """Until there was room for a moment: look again."""
        writer = asyncio.get_running_loop().create_future()
        if self.writers is None:
            self.writers = deque()
        self.writers.append(writer)
        try:
            await writer
        except asyncio.CancelledError:
            if writer.done() and not writer.cancelled():
                self.give_room()
            raise

    def shrink(self) -> None:
        """It is empty and will be for a while."""
        self.queue = self.system = None

    def close(self) -> list[Envelope]:
        """What waited; all writers look again."""
        left = [*(self.queue or ())]
        self.queue = self.system = None
        for writer in self.writers or ():
            if not writer.done():
                writer.set_result(None)
        self.writers = None
        return left
