"""What a transport offers and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

CLOSED = "it closed the connection"


class Receiver(Protocol):
    """The end of a channel in a node. What `received` raises closes the channel."""

    def received(self, payload: memoryview) -> None:
        """One whole frame; the view is valid during the call."""

    def lost(self, why: str) -> None:
        """Called once, last."""


class Channel(Protocol):
    """Frames to one peer, in order, whole, or else `lost`."""

    receiver: Receiver
    limit_bytes: int

    @property
    def writable(self) -> bool:
        """False while too much waits to be written."""

    def send(self, payload: bytes) -> None:
        """Queues a frame; those of one turn of the loop leave together."""

    async def drain(self) -> None:
        """Until it is writable or lost."""

    def close(self) -> None:
        """Sends what is queued, then ends."""


class Listener(Protocol):
    """A place where peers call."""

    endpoint: str

    def close(self) -> None: ...


Accept = Callable[[Channel], Receiver]
