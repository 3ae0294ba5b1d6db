"""Regions that stay mapped: their memory is found, touched and pinned once, and used by turns."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import Protocol, Self

from gyre.rdma.base import RegionError, RegionHandle
from gyre.rdma.shm import Attached, SharedMemory


class PageLock(Protocol):
    """Keeps pages where they are, for a device that copies from and to them by itself."""

    def lock(self, pointer: int, nbytes: int) -> None: ...

    def unlock(self, pointer: int) -> None: ...


class HeldRegion:
    """Of memory that stays mapped. Its end raises RegionError where the name was taken from the memory
    meanwhile: what was read may be of another region."""

    def __init__(self, shared: SharedMemory, handle: RegionHandle, mapped: Attached) -> None:
        self._shared = shared
        self._handle = handle
        self._mapped = mapped
        self._buffer = mapped.view()

    @property
    def handle(self) -> RegionHandle:
        return self._handle

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    def close(self) -> None:
        """Tensors made from `buffer` must be gone."""
        self._buffer.release()
        if not self._shared.has(self._handle, self._mapped):
            raise RegionError(self._handle.name, "was taken back while it was in use")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._buffer.release()


class HeldRegions:
    """Those of `shared` that this process has used: kept mapped, whatever they are called meanwhile, until
    they are freed. With a `page_lock` also locked. For any thread."""

    def __init__(self, shared: SharedMemory, page_lock: PageLock | None = None) -> None:
        self._shared = shared
        self._page_lock = page_lock
        self._mapped: list[Attached] = []
        self._lock = threading.Lock()

    def open(self, handle: RegionHandle) -> HeldRegion:
        """For reading, and for writing where it is one's own. Raises RegionError."""
        with self._lock:
            for mapped in self._mapped:
                if mapped.nbytes == handle.nbytes and self._shared.has(handle, mapped):
                    return HeldRegion(self._shared, handle, mapped)
            return HeldRegion(self._shared, handle, self._map(handle))

    def allocate(self, name: str, nbytes: int) -> HeldRegion:
        """As `SharedMemory.allocate`."""
        handle = RegionHandle(backend="shm", name=name, nbytes=nbytes)
        with contextlib.suppress(RegionError):
            return self.open(handle)
        self._shared.allocate(name, nbytes).close()
        return self.open(handle)

    def free(self, handle: RegionHandle) -> None:
        self._shared.free(handle)

    def close(self) -> None:
        with self._lock:
            while self._mapped:
                self._unmap(self._mapped.pop())

    def _map(self, handle: RegionHandle) -> Attached:
        for freed in [mapped for mapped in self._mapped if mapped.freed]:
            self._mapped.remove(freed)
            self._unmap(freed)
        mapped = self._shared.attach(handle, writable=True, populate=True)
        if self._page_lock is not None:
            self._page_lock.lock(mapped.pointer, mapped.nbytes)
        self._mapped.append(mapped)
        return mapped

    def _unmap(self, mapped: Attached) -> None:
        if self._page_lock is not None:
            self._page_lock.unlock(mapped.pointer)
        # Else it ends with the last view of it.
        with contextlib.suppress(BufferError):
            mapped.close()
