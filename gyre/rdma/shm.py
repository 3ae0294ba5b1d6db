"""Regions as files in a folder of `/dev/shm`: one host, no copy on the reader's side."""

from __future__ import annotations

import mmap
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from gyre.rdma.base import RegionError, RegionHandle

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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


class SharedMemory:
    """The regions of one job on one host. The job's root calls `sweep` when all else is over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
                os.posix_fallocate(descriptor, 0, nbytes)
                mapping = mmap.mmap(descriptor, nbytes)
        except OSError as error:
            raise RegionError(name, f"cannot allocate {nbytes} bytes in {self._folder}: {error}") from error
        return SharedRegion(RegionHandle(backend="shm", name=name, nbytes=nbytes), mapping)

    def open(self, handle: RegionHandle) -> SharedRegion:
        """The region for reading (the mapping is private: writes stay here). Raises RegionError."""
        if handle.backend != "shm":
            raise RegionError(handle.name, f"is on backend {handle.backend!r}, not 'shm'")
        try:
            with _opened(self._path(handle.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) as descriptor:
                size = os.fstat(descriptor).st_size
                if size != handle.nbytes or size == 0:
                    raise RegionError(handle.name, f"has {size} bytes, its handle says {handle.nbytes}")
                # ACCESS_COPY, because torch.frombuffer wants writable memory.
                mapping = mmap.mmap(descriptor, handle.nbytes, access=mmap.ACCESS_COPY)
        except FileNotFoundError as error:
            raise RegionError(handle.name, "is gone") from error
        except OSError as error:
            raise RegionError(handle.name, f"cannot be opened: {error}") from error
        return SharedRegion(handle, mapping)

    def free(self, handle: RegionHandle) -> None:
        self._path(handle.name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes the folder with all regions left in it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise RegionError(name, "is no region name: letters, digits, '.', '_', '-' only")
        return self._folder / name


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
