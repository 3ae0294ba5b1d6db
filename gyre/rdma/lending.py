"""Regions of shared memory for another machine, and copies of those that it has, over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import NamedTuple

from gyre.actors import Ask, Node, Ref
from gyre.rdma.base import Extent, RegionError, RegionHandle
from gyre.rdma.memory import Registered
from gyre.rdma.shm import Attached, SharedMemory, SharedRegion
from gyre.rdma.tcp import TcpBackend

# How often what was lent is looked at: it holds the memory of a region that was freed.
SWEEP_S = 1.0
FETCH_TIMEOUT_S = 1800.0


class Borrow(Ask[RegionHandle], frozen=True, kw_only=True):
    """To an actor on the machine that has the region: by what this machine reads it. Raises RegionError."""

    region: RegionHandle


class _Lent(NamedTuple):
    file: Attached
    registration: Registered


class Lending:
    """Of the actor called `name`. It listens, at the address of its node, once it is needed."""

    def __init__(self, shared: SharedMemory, node: Node, name: str) -> None:
        self.shared = shared
        # Also one that an earlier life has left.
        self._spare = f"spare-{name}"
        transport = node.transport
        where = transport.where if transport.scheme in ("tcp", "ucx") else "127.0.0.1"
        self._backend = TcpBackend(where, node.token)
        self._starting: asyncio.Task[None] | None = None
        self._lent: dict[str, _Lent] = {}
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()
        self._sweeping: asyncio.Task[None] | None = None

    async def lend(self, region: RegionHandle) -> RegionHandle:
        """What a handler of Borrow answers. It is lent until it is freed. Raises RegionError."""
        backend = await self._started()
        async with self._lock:
            lent = self._lent.get(region.name)
            if lent is None or lent.file.freed or lent.file.nbytes != region.nbytes:
                if lent is not None:
                    await self._take_back(region.name)
                file = self.shared.attach(region, writable=False)
                registration = await backend.register(f"lent-{next(self._numbers)}", file.view())
                lent = self._lent[region.name] = _Lent(file, registration)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep(), name="sweep what is lent")
        return lent.registration.handle

    async def fetch(self, region: RegionHandle, holder: Ref, name: str) -> RegionHandle:
        """A copy here, as `name`, of a region of `holder`'s machine. Raises RegionError, and what asks raise;
        then nothing is left of the copy."""
        backend = await self._started()
        there = await holder.ask(Borrow(region=region))
        copy = await self._allocate(name, region.nbytes)
        try:
            local = await backend.register(f"fetched-{next(self._numbers)}", copy.buffer)
            try:
                whole = [Extent(0, 0, region.nbytes)]
                await backend.read(local, there, whole, timeout_s=FETCH_TIMEOUT_S)
            finally:
                await local.close()
        except BaseException:
            # Not closed: the error still sees the memory, and its end is that of the mapping.
            self.shared.free(copy.handle)
            raise
        copy.close()
        return copy.handle

    async def _allocate(self, name: str, nbytes: int) -> SharedRegion:
        """In a thread: it takes the kernel a second for some GB."""
        with contextlib.suppress(RegionError):
            self.shared.rename(RegionHandle(backend="shm", name=self._spare, nbytes=nbytes), name)
        making = asyncio.get_running_loop().run_in_executor(None, self.shared.allocate, name, nbytes)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._forget)
            raise

    def _forget(self, made: asyncio.Future[SharedRegion]) -> None:
        if made.exception() is None:
            self.shared.free(made.result().handle)

    def free(self, copy: RegionHandle) -> None:
        """One that was fetched; nobody has it open. Its memory waits for the next of its size: to find and
        clear as much takes longer than to fetch it."""
        with contextlib.suppress(RegionError):
            self.shared.rename(copy, self._spare)

    async def close(self) -> None:
        self.shared.free(RegionHandle(backend="shm", name=self._spare, nbytes=0))
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        async with self._lock:
            for name in [*self._lent]:
                await self._take_back(name)
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._backend.close()

    async def _started(self) -> TcpBackend:
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._backend.start(), name="lend")
        await asyncio.shield(self._starting)
        return self._backend

    async def _sweep(self) -> None:
        while self._lent:
            await asyncio.sleep(SWEEP_S)
            async with self._lock:
                for name in [name for name, lent in self._lent.items() if lent.file.freed]:
                    await self._take_back(name)
        self._sweeping = None

    async def _take_back(self, name: str) -> None:
        lent = self._lent.pop(name)
        await lent.registration.close()
        lent.file.close()
