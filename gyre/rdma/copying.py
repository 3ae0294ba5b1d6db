"""Copies within one host, in a thread: between mapped memory, and with the memory of another process."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from gyre.rdma.base import Extent, Look, Op

# Between two looks at whether it is still wanted.
STEP_BYTES = 32 * 2**20
_VECTORS = 512
_THREADS = 2


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_ULONG, _POINTER = ctypes.c_ulong, ctypes.c_void_p
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [ctypes.c_int, _POINTER, _ULONG, _POINTER, _ULONG, _ULONG]


class Copier:
    """Threads in which no other Python waits: the copies let go of the interpreter. Two, since one core that
    copies pieces below some hundred MB, which pass its caches, does not fill what memory can do."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=name)

    async def copy(
        self,
        op: Op,
        local: int,
        remote: int,
        extents: Sequence[Extent],
        pid: int | None,
        look: Look | None = None,
    ) -> None:
        """`local`, `remote`: addresses; `pid`: whose the remote one is, None for one of ours, which may be
        looked at. Raises OSError. Cancelled, it returns when nothing is copied any more."""
        loop = asyncio.get_running_loop()
        working: set[asyncio.Future[None]] = set()
        try:
            for step in steps(extents) if look is None else looked_at_steps(extents, look.nbytes):
                if len(working) == _THREADS:
                    working = await _some_done(working)
                if look is not None:
                    work = loop.run_in_executor(self._threads, _and_look, local, remote, step, look)
                elif pid is None:
                    work = loop.run_in_executor(self._threads, _within, op, local, remote, step)
                else:
                    work = loop.run_in_executor(self._threads, _between, op, local, remote, step, pid)
                working.add(work)
            while working:
                working = await _some_done(working)
        finally:
            if working:
                await asyncio.wait(working)
                for work in working:
                    # One error is told; of the others it is known by this that somebody has them.
                    work.exception()

    def close(self) -> None:
        """Nothing is copied any more."""
        self._threads.shutdown()


async def _some_done(working: set[asyncio.Future[None]]) -> set[asyncio.Future[None]]:
    """Those that are left. Raises what a copy raised."""
    done, left = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
    for error in [work.exception() for work in done]:
        if error is not None:
            raise error
    return left


def steps(
    extents: Iterable[Extent], nbytes: int = STEP_BYTES, pieces: int = _VECTORS
) -> Iterator[list[Extent]]:
    """The same bytes, at most `nbytes` in at most `pieces` at a time."""
    step: list[Extent] = []
    room = nbytes
    for local, remote, left in extents:
        while left:
            some = min(left, room)
            step.append(Extent(local, remote, some))
            local, remote, left, room = local + some, remote + some, left - some, room - some
            if room == 0 or len(step) == pieces:
                yield step
                step, room = [], nbytes
    if step:
        yield step


def looked_at_steps(extents: Iterable[Extent], piece: int) -> Iterator[list[Extent]]:
    """Of whole pieces each."""
    return steps(extents, max(STEP_BYTES // piece, 1) * piece)


def _and_look(local: int, remote: int, extents: Sequence[Extent], look: Look) -> None:
    """A read of mapped memory."""
    for here, there, nbytes in extents:
        for at in range(0, nbytes, look.nbytes):
            ctypes.memmove(local + here + at, remote + there + at, look.nbytes)
            look.at(here + at)


def _within(op: Op, local: int, remote: int, extents: Sequence[Extent]) -> None:
    for here, there, nbytes in extents:
        if op == "read":
            ctypes.memmove(local + here, remote + there, nbytes)
        else:
            ctypes.memmove(remote + there, local + here, nbytes)


def _between(op: Op, local: int, remote: int, extents: Sequence[Extent], pid: int) -> None:
    call = _libc.process_vm_readv if op == "read" else _libc.process_vm_writev
    left = list(extents)
    while left:
        ours = (_Vector * len(left))(*[_Vector(local + here, nbytes) for here, _, nbytes in left])
        theirs = (_Vector * len(left))(*[_Vector(remote + there, nbytes) for _, there, nbytes in left])
        moved = call(pid, ours, len(left), theirs, len(left), 0)
        if moved <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"memory of process {pid}: {os.strerror(number)}")
        left = _after(left, moved)


def _after(extents: Sequence[Extent], moved: int) -> list[Extent]:
    left: list[Extent] = []
    for here, there, nbytes in extents:
        gone = min(moved, nbytes)
        moved -= gone
        if gone < nbytes:
            left.append(Extent(here + gone, there + gone, nbytes - gone))
    return left
