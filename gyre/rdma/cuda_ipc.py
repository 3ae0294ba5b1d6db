"""Within one host, from GPU to GPU: each copies out of the other's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from gyre.rdma.base import RegionError, Unusable
from gyre.rdma.copying import steps
from gyre.rdma.cuda_driver import Allocation, CudaError, Driver
from gyre.rdma.exchange import Transfer
from gyre.rdma.frames import BadFrame, Begin
from gyre.rdma.holding import Owner, Owners, Readers
from gyre.rdma.lane import Lane
from gyre.rdma.memory import Memory, Registered
from gyre.rdma.pinning import Pinning
from gyre.rdma.shm import SharedMemory

T = TypeVar("T")

# Between two looks at whether it is still wanted: some milliseconds of a link between GPUs.
STEP_BYTES = 2**30
STEP_PIECES = 2**12


class _Grant(msgspec.Struct, array_like=True):
    """The allocation that has the region, and where in it."""

    handle: bytes
    offset: int


class _Reached:
    """An allocation of another's, mapped: its owner must not free it before. Without `users` it is so only
    where it is `kept`, until its owner wants it back."""

    def __init__(self, peer: str, handle: bytes, pointer: asyncio.Future[int]) -> None:
        self.peer = peer
        self.handle = handle
        self.pointer = pointer
        self.users = 0
        self.kept = False
        self.gone = asyncio.Event()


class CudaIpcBackend(Pinning):
    """The GPU `device` of this process, for processes of this user on this host: they meet in the folder of
    `shared`. What it registers are tensors on that GPU, contiguous; not those of an allocator with expandable
    segments. What the owner has written must be there (synchronise its stream) when it tells of a region."""

    name = "cuda_ipc"

    def __init__(self, shared: SharedMemory, device: int = 0) -> None:
        """Raises Unusable."""
        super().__init__(shared.private_path(), b"")
        self._device = device
        try:
            self._driver = Driver(device)
        except OSError as error:
            fix = "it needs a GPU of NVIDIA's and its driver, and the GPU in CUDA_VISIBLE_DEVICES"
            raise Unusable("cuda_ipc", f"CUDA does not start: {error}", fix) from error
        self._entered = False
        self._shared_at: dict[str, Allocation] = {}
        self._allocated: set[str] = set()
        self._reached: dict[bytes, _Reached] = {}
        self._leaving: set[_Reached] = set()
        self._readers = Readers()
        self._owners: Owners | None = None

    async def start(self) -> None:
        await self._in_thread(self._driver.enter)
        self._entered = True
        await super().start()
        self._owners = Owners(self._open_lanes, self._let_go)

    async def _keep_reader(self, lane: Lane) -> None:
        await self._readers.serve(lane)

    async def _ending(self) -> None:
        if self._owners is not None:
            await self._owners.close()
        if self._entered:
            self._entered = False
            await self._in_thread(self._driver.leave)
        await super()._ending()

    def _in_thread(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    # --- what is registered -----------------------------------------------------------------------

    async def allocate(self, name: str, nbytes: int, *, writable: bool = False) -> Registered:
        self._check_new(name)
        if nbytes <= 0:
            raise RegionError(name, f"cannot allocate {nbytes} bytes: a region has bytes")
        try:
            pointer = await self._in_thread(self._driver.allocate, nbytes)
        except CudaError as error:
            raise RegionError(name, f"cannot allocate {nbytes} bytes: {error}") from error
        self._allocated.add(name)
        try:
            return await self._enter(name, Memory(pointer, nbytes, None, None), writable)
        except BaseException:
            if name in self._allocated:
                await self._free(name, pointer)
            raise

    async def register(self, name: str, memory: object, *, writable: bool = False) -> Registered:
        self._check_new(name)
        try:
            pointer, nbytes = memory.data_ptr(), memory.nbytes  # type: ignore[attr-defined]
            fits = memory.is_cuda and memory.is_contiguous()  # type: ignore[attr-defined]
        except AttributeError:
            raise RegionError(name, f"a {type(memory).__name__} is no tensor on a GPU") from None
        if not fits or nbytes == 0:
            raise RegionError(name, "its tensor is not contiguous, not on a GPU, or has no bytes")
        return await self._enter(name, Memory(pointer, nbytes, None, memory), writable)

    async def _attach(self, region: Registered) -> None:
        try:
            at = await self._in_thread(self._driver.device_of, region.pointer)
            if at != self._device:
                raise RegionError(region.handle.name, f"is on GPU {at}, the backend's is {self._device}")
            self._shared_at[region.handle.name] = await self._in_thread(self._driver.share, region.pointer)
        except CudaError as error:
            why = f"{error} (memory with expandable segments cannot be shared)"
            raise RegionError(region.handle.name, why) from error

    async def _detach(self, region: Registered) -> None:
        gone = self._shared_at.pop(region.handle.name).handle
        # Others may be in the same allocation.
        if all(shared.handle != gone for shared in self._shared_at.values()):
            await self._readers.drop(gone)
        if region.handle.name in self._allocated:
            await self._free(region.handle.name, region.pointer)

    async def _free(self, name: str, pointer: int) -> None:
        self._allocated.discard(name)
        await self._in_thread(self._driver.free, pointer)

    def _grant(self, region: Registered, begin: Begin) -> bytes:
        return msgspec.msgpack.encode(_Grant(*self._shared_at[region.handle.name]))

    # --- moving -----------------------------------------------------------------------------------

    async def _copy(self, lane: Lane, transfer: Transfer) -> None:
        there = transfer.granted(_Grant)
        if len(there.handle) != 64 or there.offset < 0:
            raise BadFrame("not a grant: no handle of CUDA's")
        unwanted = asyncio.Event()
        assert self._owners is not None
        owner = None
        if self._of_this_process(there.handle) is None:
            owner = await self._owners.heard(transfer.remote.peer)
        copying = self._reach_and_copy(transfer, there, owner, unwanted)
        work = asyncio.get_running_loop().create_task(copying)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            # The step under way takes some milliseconds; after it nothing more arrives.
            unwanted.set()
            await asyncio.wait({work})
            raise

    def _of_this_process(self, handle: bytes) -> int | None:
        """Where an allocation of this process begins: CUDA opens those of others only."""
        for name, shared in self._shared_at.items():
            if shared.handle == handle:
                return self._regions[name].pointer - shared.offset
        return None

    async def _reach_and_copy(
        self, transfer: Transfer, there: _Grant, owner: Owner | None, unwanted: asyncio.Event
    ) -> None:
        """Not to be cancelled: an allocation that is reached must be let go of."""
        if (own := self._of_this_process(there.handle)) is not None:
            await self._copy_in_steps(transfer, own + there.offset, unwanted)
            return
        reached = self._reached.get(there.handle)
        if reached is None:
            pointer = self._in_thread(self._driver.reach, there.handle)
            reached = self._reached[there.handle] = _Reached(transfer.remote.peer, there.handle, pointer)
            reached.kept = owner is not None and not owner.ended
        reached.users += 1
        try:
            remote = await asyncio.shield(reached.pointer) + there.offset
            await self._copy_in_steps(transfer, remote, unwanted)
        except BaseException:
            # It may be what is wrong.
            reached.kept = False
            raise
        finally:
            reached.users -= 1
            await self._unless_used(reached)

    async def _let_go(self, peer: str, handle: bytes | None) -> None:
        """Of what that peer owns."""
        known = (*self._reached.values(), *self._leaving)
        theirs = [one for one in known if one.peer == peer and handle in (None, one.handle)]
        for reached in theirs:
            reached.kept = False
        for reached in theirs:
            await self._unless_used(reached)
            await reached.gone.wait()

    async def _unless_used(self, reached: _Reached) -> None:
        """Whoever reaches it next does so after this, in the driver's thread."""
        if reached.users or reached.kept or self._reached.get(reached.handle) is not reached:
            return
        del self._reached[reached.handle]
        self._leaving.add(reached)
        try:
            if reached.pointer.exception() is None:
                await self._in_thread(self._driver.let_go, reached.pointer.result())
        finally:
            self._leaving.discard(reached)
            reached.gone.set()

    async def _copy_in_steps(self, transfer: Transfer, remote: int, unwanted: asyncio.Event) -> None:
        op, pointer = transfer.op, transfer.local.pointer
        for step in steps(transfer.extents, STEP_BYTES, STEP_PIECES):
            if unwanted.is_set():
                return
            await self._in_thread(self._driver.copy, op, pointer, remote, step)
