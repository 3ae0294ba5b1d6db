"""The contract of a transfer backend."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

import msgspec


class RegionHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Names a region of `nbytes` bytes so that another process can read it."""

    backend: str
    name: str
    nbytes: int


class RegionError(RuntimeError):
    """A region that is gone, of another size, or not a region; `name` says which."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"region {name}: {reason}")
        self.name = name
        self.reason = reason


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


class Backend(Protocol):
    """Allocates regions here and opens those of others."""

    def allocate(self, name: str, nbytes: int) -> Region:
        """A writable region; one that exists already with that size is opened for writing (ranks of one
        cell fill one region together)."""

    def open(self, handle: RegionHandle) -> Region:
        """A readable region. Raises RegionError."""

    def free(self, handle: RegionHandle) -> None:
        """Forgets the region; who has it open keeps it. Freeing twice is no error."""
