"""A region whose memory comes as it is used."""

from __future__ import annotations

import contextlib
import mmap
import os

from gyre.rdma.base import RegionError, RegionHandle
from gyre.rdma.shm import SharedMemory


class Arena:
    """`nbytes` of `shared`, there from the first byte to where `grow` came. Others open it as any region."""

    def __init__(self, shared: SharedMemory, name: str, nbytes: int) -> None:
        """In the place of what has that name. Raises RegionError."""
        self._shared = shared
        self._grown = 0
        self.handle = RegionHandle(backend="shm", name=name, nbytes=nbytes)
        shared.free(self.handle)
        try:
            self._descriptor = shared.create(name)
            try:
                os.ftruncate(self._descriptor, nbytes)
                self._memory = mmap.mmap(self._descriptor, nbytes, flags=mmap.MAP_SHARED)
            except BaseException:
                os.close(self._descriptor)
                shared.free(self.handle)
                raise
        except (OSError, ValueError, OverflowError) as error:
            raise RegionError(name, f"cannot map {nbytes} bytes in {shared.folder}: {error}") from error
        self.buffer = memoryview(self._memory)

    def grow(self, nbytes: int) -> None:
        """The first so many are there. Raises RegionError where there is no room, or it was closed."""
        if self._descriptor < 0:
            raise RegionError(self.handle.name, "was closed")
        if nbytes > self._grown:
            try:
                # A full /dev/shm is an error here, not a SIGBUS at the first write.
                os.posix_fallocate(self._descriptor, self._grown, nbytes - self._grown)
            except OSError as error:
                raise RegionError(self.handle.name, f"cannot grow to {nbytes} bytes: {error}") from error
            self._grown = nbytes

    def free(self) -> None:
        """Nobody finds it any more; who has it open keeps it."""
        self._shared.free(self.handle)

    def close(self) -> None:
        """After `free`. Not on a loop: it takes the kernel half a second a GB. With views of it the memory
        ends with the last one."""
        # The number may be another file's as soon as it is closed.
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
        self.buffer.release()
        with contextlib.suppress(BufferError):
            self._memory.close()
