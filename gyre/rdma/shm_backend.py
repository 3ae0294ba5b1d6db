"""Within one host: shared memory that is mapped once and copied once."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence

import msgspec

from gyre.rdma.base import Extent, Look, Op, RegionError, RegionHandle
from gyre.rdma.copying import Copier
from gyre.rdma.exchange import Transfer
from gyre.rdma.frames import Begin
from gyre.rdma.lane import Lane
from gyre.rdma.memory import Registered, of_host
from gyre.rdma.pinning import Pinning
from gyre.rdma.shm import Attached, SharedMemory
from gyre.rdma.stages import At, told

# How often mapped files are looked at: one that was freed holds memory as long as it is mapped.
SWEEP_S = 1.0
UNUSED_S = 60.0


class _Grant(msgspec.Struct, array_like=True):
    """Where it is: at an address of the holder's, or in a file (0)."""

    pointer: int


class ShmBackend(Pinning):
    """Over the regions of `shared`, whose folder only this user can enter: that is what keeps others out.
    What it allocates is there, and `shared.open` maps it too; a handle of `shared` itself can be read from as
    long as the file is there. Memory that was registered is copied out of the holder's process, which the
    kernel must allow (it does among processes of one user unless Yama forbids it)."""

    name = "shm"

    def __init__(self, shared: SharedMemory) -> None:
        super().__init__(shared.private_path(), b"")
        self._shared = shared
        self._copier = Copier("gyre-rdma-shm")
        self._mapped: dict[tuple[str, bool], Attached] = {}
        # No longer to be found, and still being copied.
        self._old: list[Attached] = []
        self._sweeping: asyncio.TimerHandle | None = None
        self._files: set[str] = set()

    async def allocate(self, name: str, nbytes: int, *, writable: bool = False) -> Registered:
        self._check_new(name)
        loop = asyncio.get_running_loop()
        file = await loop.run_in_executor(self._thread, self._shared.allocate, name, nbytes)
        self._files.add(name)
        try:
            return await self._enter(name, of_host(file.buffer), writable)
        except BaseException:
            self._forget(file.handle)
            raise

    async def _attach(self, region: Registered) -> None:
        """Who reads it asks the kernel."""

    async def _detach(self, region: Registered) -> None:
        if region.handle.name in self._files:
            self._forget(region.handle)

    def _forget(self, handle: RegionHandle) -> None:
        self._files.discard(handle.name)
        self._shared.free(handle)

    async def close(self) -> None:
        await super().close()
        self._copier.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for mapped in [*self._mapped.values(), *self._old]:
            mapped.close()
        self._mapped.clear()
        self._old.clear()

    # --- moving -----------------------------------------------------------------------------------

    async def _request(
        self, op: Op, local: Registered, remote: RegionHandle, extents: Sequence[Extent], timeout_s: float
    ) -> None:
        if remote.peer:
            await super()._request(op, local, remote, extents, timeout_s)
        elif op == "write":
            raise RegionError(remote.name, "has no holder who would allow it to be written")
        else:
            await self._read_mapped(local, remote, extents, timeout_s)

    async def _read_and_look(
        self,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        timeout_s: float,
        look: Look,
    ) -> None:
        if remote.peer:
            await super()._read_and_look(local, remote, extents, timeout_s, look)
        else:
            joined = self._checked("read", local, remote, extents, timeout_s)
            await self._read_mapped(local, remote, joined, timeout_s, look)

    async def _read_mapped(
        self,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        timeout_s: float,
        look: Look | None = None,
    ) -> None:
        """Of a region whose name is enough."""
        with local.used(), told(remote.name, "this host", At("move"), timeout_s, self._lost):
            async with asyncio.timeout(timeout_s):
                await self._copy_mapped("read", local, remote, extents, look)

    async def _copy(self, lane: Lane, transfer: Transfer) -> None:
        there = transfer.granted(_Grant)
        if there.pointer == 0:
            await self._copy_mapped(transfer.op, transfer.local, transfer.remote, transfer.extents)
        else:
            pointer, process = transfer.local.pointer, _process(lane)
            await self._copier.copy(transfer.op, pointer, there.pointer, transfer.extents, process)

    async def _copy_mapped(
        self,
        op: Op,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        look: Look | None = None,
    ) -> None:
        mapped = self._map(remote, writable=remote.peer != "")
        mapped.users += 1
        try:
            await self._copier.copy(op, local.pointer, mapped.pointer, extents, None, look)
        finally:
            mapped.users -= 1
            mapped.used_s = asyncio.get_running_loop().time()

    def _grant(self, region: Registered, begin: Begin) -> bytes:
        in_file = region.handle.name in self._files
        return msgspec.msgpack.encode(_Grant(0 if in_file else region.pointer))

    # --- mapped files -----------------------------------------------------------------------------

    def _map(self, remote: RegionHandle, *, writable: bool) -> Attached:
        key = (remote.name, writable)
        mapped = self._mapped.get(key)
        if mapped is None or mapped.freed or mapped.nbytes != remote.nbytes:
            if mapped is not None:
                # Not both there and here, whether or not there is another.
                self._old.append(self._mapped.pop(key))
            mapped = self._mapped[key] = self._shared.attach(remote, writable=writable)
            mapped.used_s = asyncio.get_running_loop().time()
            self._sweep()
        return mapped

    def _sweep(self) -> None:
        """Lets go of what was freed by its holder, or not used for long."""
        loop = asyncio.get_running_loop()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for key, mapped in [*self._mapped.items()]:
            if mapped.freed or mapped.used_s + UNUSED_S < loop.time():
                self._old.append(self._mapped.pop(key))
        for mapped in [*self._old]:
            if not mapped.users:
                self._old.remove(mapped)
                mapped.close()
        again = bool(self._mapped or self._old)
        self._sweeping = loop.call_later(SWEEP_S, self._sweep) if again else None


def _process(lane: Lane) -> int:
    """Of the other end of a unix socket."""
    credentials = struct.Struct("3i")
    found = lane.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return int(credentials.unpack(found)[0])
