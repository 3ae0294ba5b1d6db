"""Regions as files in a folder of `/dev/shm`: one host, no copy on the reader's side."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from gyre.rdma.base import RegionError, RegionHandle
from gyre.rdma.memory import checked_name, pointer


class SharedRegion:
    """A mapping of one file."""

    def __init__(self, handle: RegionHandle, mapping: mmap.mmap) -> None:
        self._handle = handle
        self._mapping = mapping
        self._buffer = memoryview(mapping)

    @property
    def handle(self) -> RegionHandle:
        return self._handle

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    def close(self) -> None:
        """Unmaps. Tensors made from `buffer` must be gone."""
        self._buffer.release()
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Attached:
    """A mapped file that is kept, whatever it is called meanwhile, and who is at it."""

    def __init__(self, memory: mmap.mmap, descriptor: int) -> None:
        self._memory = memory
        self._descriptor = descriptor
        self.inode = os.fstat(descriptor).st_ino
        self.nbytes = len(memory)
        self.pointer = pointer(memoryview(memory))
        self.users = 0
        self.used_s = 0.0

    def view(self) -> memoryview:
        return memoryview(self._memory)

    @property
    def freed(self) -> bool:
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        os.close(self._descriptor)
        self._memory.close()


class SharedMemory:
    """The regions of one job on one host, whose folder goes with the job. What belongs to one `owner` alone
    is named `owner`, or `owner-...`."""

    def __init__(self, folder: Path, owner: str = "") -> None:
        self.folder = folder
        self._owner = owner
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def allocate(self, name: str, nbytes: int) -> SharedRegion:
        """A region of `nbytes` > 0 bytes, zero where it is new. Raises RegionError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with _opened(self._path(name), flags) as descriptor:
                size = os.fstat(descriptor).st_size
                if size not in (0, nbytes):
                    raise RegionError(name, f"exists with {size} bytes, not {nbytes}")
                # Reserves the pages now: a full /dev/shm is an error here, not a SIGBUS at the first write.
                try:
                    os.posix_fallocate(descriptor, 0, nbytes)
                except OSError:
                    if size == 0:
                        self._path(name).unlink(missing_ok=True)
                    raise
                # The pages are there: to map them at once takes a third of mapping them one by one.
                mapping = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            raise RegionError(name, f"cannot allocate {nbytes} bytes in {self.folder}: {error}") from error
        return SharedRegion(RegionHandle(backend="shm", name=name, nbytes=nbytes), mapping)

    def create(self, name: str) -> int:
        """A descriptor of a new, empty file of that name. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._path(name), flags, 0o600)

    def open(self, handle: RegionHandle) -> SharedRegion:
        """The region for reading (the mapping is private: writes stay here). Raises RegionError."""
        with self._file(handle, os.O_RDONLY) as descriptor:
            # ACCESS_COPY, because torch.frombuffer wants writable memory.
            return SharedRegion(handle, mmap.mmap(descriptor, handle.nbytes, access=mmap.ACCESS_COPY))

    def rename(self, handle: RegionHandle, name: str) -> RegionHandle:
        """The same memory under another name, in the place of what has that. Raises RegionError."""
        path = self._path(name)
        with self._file(handle, os.O_RDONLY):
            os.replace(self._path(handle.name), path)
        return RegionHandle(backend="shm", name=name, nbytes=handle.nbytes)

    def attach(self, handle: RegionHandle, *, writable: bool, populate: bool = False) -> Attached:
        """The file itself, and whether it was freed meanwhile; with `populate`, for what is writable, mapped
        all at once. Raises RegionError."""
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
        if populate:
            flags |= mmap.MAP_POPULATE
        with self._file(handle, os.O_RDWR if writable else os.O_RDONLY) as descriptor:
            return Attached(mmap.mmap(descriptor, handle.nbytes, flags=flags), os.dup(descriptor))

    def has(self, handle: RegionHandle, mapped: Attached) -> bool:
        """Whether the region is that file, and not freed, renamed, or another by now."""
        try:
            return os.stat(self._path(handle.name)).st_ino == mapped.inode
        except FileNotFoundError:
            return False

    @contextmanager
    def _file(self, handle: RegionHandle, flags: int) -> Iterator[int]:
        if handle.backend != "shm":
            raise RegionError(handle.name, f"is on backend {handle.backend!r}, not 'shm'")
        try:
            with _opened(self._path(handle.name), flags | os.O_NOFOLLOW | os.O_CLOEXEC) as descriptor:
                size = os.fstat(descriptor).st_size
                if size != handle.nbytes or size == 0:
                    raise RegionError(handle.name, f"has {size} bytes, its handle says {handle.nbytes}")
                yield descriptor
        except FileNotFoundError as error:
            raise RegionError(handle.name, "is gone") from error
        except OSError as error:
            raise RegionError(handle.name, f"cannot be opened: {error}") from error

    def free(self, *handles: RegionHandle) -> None:
        """Not on a loop if they are large: it takes the kernel half a second a GB."""
        for handle in handles:
            self._path(handle.name).unlink(missing_ok=True)

    def free_all(self, pattern: str, but: Collection[str] = ()) -> None:
        """The regions whose names match, `*` being anything, all but those."""
        for path in self.folder.glob(pattern):
            if path.name not in but:
                path.unlink(missing_ok=True)

    def private_path(self) -> str:
        """In the folder, of no region: for a socket."""
        owner = f"{self._owner}-" if self._owner else ""
        return str(self.folder / f".{owner}{os.urandom(6).hex()}")

    def sweep_own(self) -> None:
        """Removes what an earlier life of its owner, which was killed, has left: whoever has it mapped keeps
        it."""
        for name in os.listdir(self.folder):
            visible = name.removeprefix(".")
            if self._owner and (visible == self._owner or visible.startswith(f"{self._owner}-")):
                (self.folder / name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / checked_name(name)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
