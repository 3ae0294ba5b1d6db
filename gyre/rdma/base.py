"""The contracts: memory that processes of one host map by name, and memory that others read and write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self

import msgspec

Stage = Literal["dial", "admit", "move", "look", "notify"]
Op = Literal["read", "write"]
DEFAULT_TIMEOUT_S = 30.0


class RegionHandle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names a region of `nbytes` bytes so that another process can reach it. `peer`: where its holder
    listens, "" where the name is enough. `key`: what the holder wants to hear."""

    backend: str
    name: str
    nbytes: int
    peer: str = ""
    key: bytes = b""


class Extent(NamedTuple):
    """A run of bytes, here and there."""

    local: int
    remote: int
    nbytes: int


class Note(NamedTuple):
    """What a peer told; `peer` is where it listens itself."""

    peer: str
    message: bytes


class RegionError(RuntimeError):
    """A region that is gone, of another size, or not a region; `name` says which."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"region {name}: {reason}")
        self.name = name
        self.reason = reason


class TransferError(RegionError):
    """A read, a write or a notification (then `name` is "") that failed at `peer` in `stage`. Of a write some
    bytes may have arrived."""

    def __init__(self, name: str, peer: str, stage: Stage, reason: str) -> None:
        super().__init__(name, reason)
        what = f"region {name} of {peer}" if name else f"peer {peer}"
        self.args = (f"{what}: {stage}: {reason}",)
        self.peer = peer
        self.stage = stage


class Refused(TransferError):
    """The holder does not know the region, or not by that key, or does not allow that."""


class PeerLost(TransferError):
    """The peer cannot be reached, has died, or does not speak as it should."""


class TransferTimeout(TransferError):
    """Not done in time."""


class Unusable(RuntimeError):
    """This process cannot use that backend: `why`, and what to do about it."""

    def __init__(self, backend: str, why: str, fix: str) -> None:
        super().__init__(f"backend {backend!r} cannot be used: {why}; {fix}")
        self.backend = backend
        self.why = why
        self.fix = fix


class Look(NamedTuple):
    """At what is read, piece by piece: `at` is called in threads with the offset in the local memory of each
    piece of `nbytes` that is there, where the backend can while the core that copied it has it in its cache.
    Extents are of whole pieces."""

    nbytes: int
    at: Callable[[int], None]


class Region(Protocol):
    """Mapped bytes. `buffer` is valid until `close`."""

    @property
    def handle(self) -> RegionHandle: ...

    @property
    def buffer(self) -> memoryview: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Regions(Protocol):
    """Named memory that the processes of a job on one host map, without a copy."""

    def allocate(self, name: str, nbytes: int) -> Region:
        """A writable region; one that exists already with that size is opened for writing (ranks of one
        cell fill one region together)."""

    def open(self, handle: RegionHandle) -> Region:
        """A readable region. Raises RegionError."""

    def free(self, handle: RegionHandle) -> None:
        """Forgets the region; who has it open keeps it. Freeing twice is no error."""


class Registration(Protocol):
    """Memory that others may read, and write where it is `writable`, until `close`."""

    @property
    def handle(self) -> RegionHandle: ...

    @property
    def buffer(self) -> memoryview: ...

    async def close(self) -> None:
        """Refuses what begins now, and returns when what had begun is over (of an operation on several
        connections, the part that had). The memory is the caller's again; that which was allocated goes with
        the last view of it."""


class Backend(Protocol):
    """A way to move bytes between registered memory, here and elsewhere. All on one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str:
        """Where peers reach it."""

    async def start(self) -> None:
        """Listens. Raises OSError."""

    async def allocate(self, name: str, nbytes: int, *, writable: bool = False) -> Registration:
        """New memory, zero, registered. Raises RegionError."""

    async def register(self, name: str, memory: object, *, writable: bool = False) -> Registration:
        """The caller's own memory, contiguous and not moved or freed before `close`; once, at the start: with
        RDMA it takes a second for some GB. Raises RegionError."""

    async def read(
        self,
        local: Registration,
        remote: RegionHandle,
        extents: Sequence[Extent],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        look: Look | None = None,
    ) -> None:
        """Fills `local` from `remote`; returns when the bytes are there and looked at. After an error those
        of the extents are undefined; no more arrive, but with `mooncake` and `nixl`, which cannot be stopped,
        until `close` of `local` returns. Raises RegionError, TransferError, and what a look does."""

    async def write(
        self,
        local: Registration,
        remote: RegionHandle,
        extents: Sequence[Extent],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Fills `remote` from `local`; returns when the bytes are there. Raises as `read` does."""

    async def notify(self, peer: str, message: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Returns when the peer has it in its queue. Raises TransferError."""

    async def until_lost(self, peer: str) -> None:
        """Returns when the peer has died, closed, or cannot be reached. Raises TransferError where that is
        not known."""

    def notes(self) -> AsyncIterator[Note]:
        """What peers tell, in the order it came, until `close`. One reader at a time."""

    async def close(self) -> None:
        """Closes all registrations, connections and threads."""
