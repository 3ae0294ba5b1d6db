"""What a transport offers and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

CLOSED = "it closed the connection"


class TransportUnusable(RuntimeError):
    """This process cannot use that transport: `why`, and what to do about it."""

    def __init__(self, scheme: str, why: str, fix: str) -> None:
        super().__init__(f"transport {scheme!r} cannot be used: {why}; {fix}")
        self.scheme = scheme
        self.why = why
        self.fix = fix


class Receiver(Protocol):
    """The end of a channel in a node. What `received` raises closes the channel."""

    def received(self, payload: memoryview) -> None:
        """One whole frame; the view is valid during the call."""

    def lost(self, why: str) -> None:
        """Called once, last."""


class Channel(Protocol):
    """Frames to one peer, in order, whole, or else `lost`. A `far` peer may vanish without a word. `single`:
    nothing came with the frame that is being received."""

    receiver: Receiver
    limit_bytes: int
    far: bool
    single: bool

    @property
    def writable(self) -> bool:
        """False while too much waits to be written."""

    def send(self, payload: bytes) -> None:
        """Queues a frame; those of one turn of the loop leave together."""

    async def drain(self) -> None:
        """Until it is writable or lost."""

    def close(self) -> None:
        """Sends what is queued, then ends."""

    def abort(self) -> None:
        """Ends at once: nobody reads there any more."""


class Listener(Protocol):
    """A place where peers call."""

    endpoint: str

    def close(self) -> None: ...


Accept = Callable[[Channel], Receiver]


class Transport(Protocol):
    """A way to other nodes. Its endpoints are `scheme:rest`. `where` is what another process needs to
    listen as this one does: a folder, an address."""

    scheme: str
    where: str

    async def listen(self, name: str, accept: Accept) -> Listener:
        """As the node called `name`; `accept` gets each channel."""

    async def dial(self, rest: str, receiver: Receiver) -> Channel:
        """A channel to a listening node, its frames to `receiver`. OSError, ValueError, LinkLost."""

    async def close(self) -> None:
        """Its listeners and channels were closed before; returns when these have sent what they had, and what
        it made for itself is gone."""
