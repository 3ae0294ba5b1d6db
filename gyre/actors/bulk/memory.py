"""Memory that is used again: the page faults of fresh memory cost more than the copy into it."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import weakref
from collections.abc import Callable
from contextvars import Context
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import ctypes

SMALLEST_BYTES = 256 * 1024
IDLE_BYTES = 256 * 2**20
IDLE_S = 20.0


class Chunk(Protocol):
    """What a pool keeps."""

    nbytes: int

    def close(self) -> None: ...


C = TypeVar("C", bound=Chunk)


def size_class(nbytes: int) -> int:
    """The power of two that so many bytes are kept in."""
    return max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())


@lru_cache(64)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    import ctypes  # only who is sent blobs needs it

    return ctypes.c_ubyte * nbytes


def lend(
    memory: mmap.mmap, loop: asyncio.AbstractEventLoop, context: Context, back: Callable[[], None]
) -> memoryview:
    """A view of `memory`. `back` is called on the loop, in `context`, when neither it nor any view, array or
    slice made of it is left, whichever thread drops the last."""
    # All views hold on to this object, and it can have a finalizer, which an mmap's own view cannot.
    exporter = _array(len(memory)).from_buffer(memory)
    weakref.finalize(exporter, _over, loop, context, back).atexit = False
    return memoryview(exporter).cast("B")


def _over(loop: asyncio.AbstractEventLoop, context: Context, back: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and all of its memory with it
        # Not in the scope of whoever drops it: that would hold the message at hand.
        loop.call_soon_threadsafe(back, context=context)


class Buffer:
    """Private memory that bytes of a connection are read into."""

    def __init__(self, nbytes: int) -> None:
        """OSError, MemoryError, OverflowError where there is not so much."""
        self.nbytes = nbytes
        self.memory = mmap.mmap(-1, nbytes)

    def close(self) -> None:
        """It goes with its last view."""


class Pool(Generic[C]):
    """Idle chunks by size, the last used first. What is over the bound, or idle for long, is closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: Context,
        closing: Callable[[C], None] = lambda chunk: None,
    ) -> None:
        self._loop = loop
        self._context = context
        self._closing = closing
        self._idle: list[tuple[float, C]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.idle_bytes = 0

    def take(self, nbytes: int) -> C | None:
        """One of exactly so many bytes."""
        for at in range(len(self._idle) - 1, -1, -1):
            chunk = self._idle[at][1]
            if chunk.nbytes == nbytes:
                del self._idle[at]
                self.idle_bytes -= nbytes
                return chunk
        return None

    def give(self, chunk: C) -> None:
        self._idle.append((self._loop.time(), chunk))
        self.idle_bytes += chunk.nbytes
        while self._idle and (self._closed or self.idle_bytes > IDLE_BYTES):
            self._drop()
        if self._idle and self._timer is None:
            self._timer = self._loop.call_later(IDLE_S, self._trim, context=self._context)

    def close(self) -> None:
        """All goes, and what is given later too."""
        self._closed = True
        while self._idle:
            self._drop()
        if self._timer is not None:
            self._timer.cancel()

    def _drop(self) -> None:
        _, chunk = self._idle.pop(0)
        self.idle_bytes -= chunk.nbytes
        self._closing(chunk)
        chunk.close()

    def _trim(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._idle and self._idle[0][0] <= now - IDLE_S:
            self._drop()
        if self._idle:
            self._timer = self._loop.call_at(self._idle[0][0] + IDLE_S, self._trim, context=self._context)
