"""Registered memory, and who is at it."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from gyre.rdma.base import Extent, Op, RegionError, RegionHandle

KEY_BYTES = 16
# How long `close` waits for what others have begun, before it hangs up on them.
CLOSE_TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def checked_name(name: str) -> str:
    """Raises RegionError."""
    if not _NAME.fullmatch(name):
        raise RegionError(name, "is no region name: letters, digits, '.', '_', '-' only")
    return name


def new_key() -> bytes:
    return os.urandom(KEY_BYTES)


def bytes_of(name: str, memory: object, *, writable: bool) -> memoryview:
    """Its bytes, not copied. Raises RegionError."""
    try:
        view = memoryview(memory).cast("B")  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise RegionError(name, f"its memory cannot be registered: {error}") from error
    if view.nbytes == 0:
        raise RegionError(name, "has no bytes")
    if writable and view.readonly:
        raise RegionError(name, "its memory is read-only")
    return view


def fresh_bytes(name: str, nbytes: int) -> memoryview:
    """New memory, there from now on. Raises RegionError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    try:
        if nbytes <= 0:
            raise ValueError("a region has bytes")
        return memoryview(mmap.mmap(-1, nbytes, flags=flags))
    except (OSError, ValueError, OverflowError) as error:
        raise RegionError(name, f"cannot allocate {nbytes} bytes: {error}") from error


def pointer(view: memoryview) -> int:
    """Where it begins."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    import numpy as np  # slow to import, and few processes come here

    return int(np.frombuffer(view, np.uint8).ctypes.data)


class Memory(NamedTuple):
    """A run of bytes. `view`: where this process can look at them; `owner`: what keeps them there."""

    pointer: int
    nbytes: int
    view: memoryview | None
    owner: object


def of_host(view: memoryview) -> Memory:
    """Memory of this process."""
    return Memory(pointer(view), view.nbytes, view, view)


class Registered:
    """One registration of a backend."""

    def __init__(
        self,
        backend: object,
        handle: RegionHandle,
        memory: Memory,
        writable: bool,
        undo: Callable[[Registered], Awaitable[None]],
    ) -> None:
        """`undo`: called once, when nothing is at the memory any more. Others get in once it is `open`."""
        self.backend = backend
        self._handle = handle
        self._memory: Memory | None = memory
        self.pointer = memory.pointer
        self.writable = writable
        self._undo = undo
        self._users = 0
        self._unused: asyncio.Event = asyncio.Event()
        self._unused.set()
        self._hang_up: dict[int, Callable[[], None]] = {}
        self._closing: asyncio.Task[None] | None = None
        self.open = False

    @property
    def handle(self) -> RegionHandle:
        return self._handle

    @property
    def buffer(self) -> memoryview:
        if self._memory is None:
            raise RegionError(self._handle.name, "is closed")
        if self._memory.view is None:
            raise RegionError(self._handle.name, "is in the memory of a GPU")
        return self._memory.view

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self.buffer[offset : offset + nbytes]

    @contextmanager
    def used(self, hang_up: Callable[[], None] | None = None) -> Iterator[None]:
        """Somebody is at the memory; `hang_up` ends that where `close` has waited too long."""
        if not self.open:
            raise RegionError(self._handle.name, "is closed")
        self.keep()
        key = id(hang_up)
        if hang_up is not None:
            self._hang_up[key] = hang_up
        try:
            yield
        finally:
            self._hang_up.pop(key, None)
            self.let_go()

    def keep(self) -> None:
        """Something will be at the memory until `let_go`."""
        self._users += 1
        self._unused.clear()

    def let_go(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._unused.set()

    async def close(self) -> None:
        self.open = False
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._end(), name="close a registration")
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._unused.wait()
        except TimeoutError:
            for hang_up in [*self._hang_up.values()]:
                hang_up()
            await self._unused.wait()
        await self._undo(self)
        self._memory = None


def check_extents(op: Op, here: RegionHandle, there: RegionHandle, extents: Sequence[Extent]) -> list[Extent]:
    """With those joined that go on where the one before ends. Raises RegionError."""
    room, far_room = here.nbytes, there.nbytes
    joined: list[Extent] = []
    # The run so far. It is one of thousands: tuples are made only of what is joined.
    start = far_start = end = far_end = 0
    for at, far, nbytes in extents:
        if nbytes <= 0 or at < 0 or at + nbytes > room:
            raise RegionError(here.name, f"{op}: {nbytes} bytes at {at} of its {here.nbytes}")
        if far < 0 or far + nbytes > far_room:
            raise RegionError(there.name, f"{op}: {nbytes} bytes at {far} of its {there.nbytes}")
        if at != end or far != far_end:
            if end > start:
                joined.append(Extent(start, far_start, end - start))
            start, far_start = at, far
        end, far_end = at + nbytes, far + nbytes
    if end > start:
        joined.append(Extent(start, far_start, end - start))
    return joined


def check_pieces(extents: Sequence[Extent], nbytes: int) -> None:
    """Raises ValueError for one that is not of whole pieces."""
    for extent in extents:
        if nbytes <= 0 or extent.nbytes % nbytes:
            raise ValueError(f"{extent.nbytes} bytes are not whole pieces of {nbytes}")


def stripes(extents: Sequence[Extent], at_most: int, bytes_each: int, pieces_each: int) -> list[list[Extent]]:
    """The same bytes in parts of about the same size, each at most `pieces_each` extents: one where there are
    few bytes, else up to `at_most`, or more where there are too many pieces."""
    total = sum(nbytes for _, _, nbytes in extents)
    count = max(1, min(at_most, total // bytes_each))
    if count == 1 and len(extents) <= pieces_each:
        return [list(extents)] if total else []
    share = -(-total // count)
    parts: list[list[Extent]] = [[]]
    room = share
    for local, remote, left in extents:
        while left:
            if room == 0 or len(parts[-1]) == pieces_each:
                parts.append([])
                room = share if room == 0 else room
            some = min(left, room)
            parts[-1].append(Extent(local, remote, some))
            local, remote, left, room = local + some, remote + some, left - some, room - some
    return [part for part in parts if part]
