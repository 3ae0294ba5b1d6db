"""What is needed of CUDA's driver, by ctypes: so that no memory of it goes by an allocator that hides it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from gyre.rdma.base import Extent, Op

_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_POINTER_DEVICE = 9
_IN_STREAM = 1
# For all devices of the process.
_PORTABLE = 1


class CudaError(OSError):
    """A call of the driver that failed."""


class IpcHandle(ctypes.Structure):
    """Of a whole allocation, for another process."""

    _fields_ = [("bytes", ctypes.c_byte * 64)]


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    """Locations are hints, for memory that may be anywhere."""

    _fields_ = [("order", ctypes.c_int), ("of", _Location), ("to", _Location), ("flags", ctypes.c_uint)]


class Allocation(NamedTuple):
    """Where a pointer lies: its allocation begins `offset` bytes before."""

    handle: bytes
    offset: int


class Library:
    """The driver, and one device."""

    def __init__(self, device: int) -> None:
        """Raises OSError where there is no driver, CudaError where there is no such device."""
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", ctypes.c_uint(0))
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(device))

    def _retain(self) -> ctypes.c_void_p:
        """The context that torch uses too. It stays until it is released."""
        found = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(found), self._device)
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._library, name)
        status = function(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            raise CudaError(f"{name}: {text.value.decode() if text.value else f'status {status}'}")


class HostPages(Library):
    """Pins memory of this process for its GPUs. For any thread, which keeps the device that it has, or none.
    Not by CUDA's runtime: where a call of that fails, so does the next kernel of the thread."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        # Never released: what is pinned would end with it.
        self._context = self._retain()

    def lock(self, pointer: int, nbytes: int) -> None:
        with self._entered():
            where, flags = ctypes.c_void_p(pointer), ctypes.c_uint(_PORTABLE)
            self._call("cuMemHostRegister_v2", where, ctypes.c_size_t(nbytes), flags)

    def unlock(self, pointer: int) -> None:
        with self._entered():
            self._call("cuMemHostUnregister", ctypes.c_void_p(pointer))

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class Driver(Library):
    """One device. All calls but `__init__` belong in one thread, the one that called `enter`."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self._stream = ctypes.c_void_p()
        # Since CUDA 12.8.
        self._batches = hasattr(self._library, "cuMemcpyBatchAsync")

    def enter(self) -> None:
        self._call("cuCtxSetCurrent", self._retain())
        self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))

    def leave(self) -> None:
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuCtxSetCurrent", ctypes.c_void_p())
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def allocate(self, nbytes: int) -> int:
        """Zero. Its address."""
        found = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(found), ctypes.c_size_t(nbytes))
        self._call("cuMemsetD8Async", found, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes), self._stream)
        self._call("cuStreamSynchronize", self._stream)
        return found.value

    def free(self, pointer: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def share(self, pointer: int) -> Allocation:
        """For `reach` in another process. CudaError where its allocator's memory cannot be shared."""
        base, nbytes, handle = ctypes.c_uint64(), ctypes.c_size_t(), IpcHandle()
        where = ctypes.c_uint64(pointer)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), where)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return Allocation(bytes(handle), pointer - base.value)

    def reach(self, handle: bytes) -> int:
        """Where the allocation begins for this process. `let_go` before its owner frees it."""
        found = ctypes.c_uint64()
        there = IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(found), there, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return found.value

    def let_go(self, pointer: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def copy(self, op: Op, local: int, remote: int, extents: Sequence[Extent]) -> None:
        """Blocks until it is done."""
        ours = [local + extent.local for extent in extents]
        theirs = [remote + extent.remote for extent in extents]
        to, of = (ours, theirs) if op == "read" else (theirs, ours)
        nbytes = [extent.nbytes for extent in extents]
        try:
            if self._batches and len(extents) > 1:
                self._copy_batch(to, of, nbytes)
            else:
                for a, b, count in zip(to, of, nbytes, strict=True):
                    call = ctypes.c_uint64(a), ctypes.c_uint64(b), ctypes.c_size_t(count)
                    self._call("cuMemcpyAsync", *call, self._stream)
        finally:
            self._call("cuStreamSynchronize", self._stream)

    def _copy_batch(self, to: list[int], of: list[int], nbytes: list[int]) -> None:
        """In one call: of many small ones the calls take longer than the bytes."""
        pointers, sizes = ctypes.c_uint64 * len(to), ctypes.c_size_t * len(to)
        how, first, failed = _CopyAttributes(order=_IN_STREAM), ctypes.c_size_t(0), ctypes.c_size_t()
        self._call(
            "cuMemcpyBatchAsync",
            pointers(*to),
            pointers(*of),
            sizes(*nbytes),
            ctypes.c_size_t(len(to)),
            ctypes.byref(how),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            self._stream,
        )

    def device_of(self, pointer: int) -> int:
        found = ctypes.c_int()
        attribute = ctypes.c_int(_POINTER_DEVICE)
        self._call("cuPointerGetAttribute", ctypes.byref(found), attribute, ctypes.c_uint64(pointer))
        return found.value
