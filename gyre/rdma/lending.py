"""Regions of shared memory for another machine, and copies of those that it has, over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import NamedTuple

from gyre.actors import Ask, Node, Ref
from gyre.rdma.base import Extent, Region, RegionError, RegionHandle
from gyre.rdma.held import HeldRegions
from gyre.rdma.loop_thread import LoopThread
from gyre.rdma.memory import Registered
from gyre.rdma.page_sums import checksum_of, sums_of
from gyre.rdma.shm import Attached, SharedMemory
from gyre.rdma.tcp import CONNECTIONS, TcpBackend

# How often what was lent is looked at: it holds the memory of a region that was freed.
SWEEP_S = 1.0
# Read at once on one connection: whole pages, and what is still in a cache when it is looked at.
PART_BYTES = 8 * 2**20
# For one: a holder that stands still keeps nobody for as long as all of a region may take.
PART_TIMEOUT_S = 60.0

Allocate = Callable[[str, int], Region]


class Borrow(Ask[RegionHandle], frozen=True, kw_only=True):
    """To an actor on the machine that has the region: by what this machine reads it. Raises RegionError."""

    region: RegionHandle


class Corrupt(RegionError):
    """A copy is not what its checksum says."""


class Lending:
    """Of the actor called `name`. It listens, at the address of its node, once it is needed: in a thread, so
    that those who read neither wait for the actor nor keep it waiting."""

    def __init__(self, shared: SharedMemory, node: Node, name: str) -> None:
        self.shared = shared
        # Also one that an earlier life has left.
        self._spare = f"spare-{name}"
        transport = node.transport
        where = transport.where if transport.scheme in ("tcp", "ucx") else "127.0.0.1"
        self._held = HeldRegions(shared)
        self._thread = LoopThread(f"lend-{name}")
        self._desk = _Desk(shared, where, node.token)

    async def lend(self, region: RegionHandle) -> RegionHandle:
        """What a handler of Borrow answers. It is lent until it is freed. Raises RegionError."""
        return await self._thread.run(self._desk.lend(region))

    async def reserve(self, nbytes: int) -> RegionHandle:
        """Memory for what `refresh` brings, found and mapped now. Raises RegionError."""
        name = f"{self._spare}-new"
        (await self._allocate(name, nbytes, self._held.allocate)).close()
        return self.shared.rename(_handle(name, nbytes), self._spare)

    async def fetch(self, region: RegionHandle, holder: Ref, name: str) -> RegionHandle:
        """A copy here, as `name`, of a region of `holder`'s machine. Raises RegionError, as where a part does
        not come in time, and what asks raise; then nothing is left of the copy."""
        return await self._bring(region, holder, name, self.shared.allocate, None)

    async def refresh(self, region: RegionHandle, holder: Ref, name: str, checksum: int) -> RegionHandle:
        """As `fetch`, for what comes again and again: its memory stays mapped from one to the next. Raises
        Corrupt where the copy has not that `page_sum`."""
        return await self._bring(region, holder, name, self._held.allocate, checksum)

    async def _bring(
        self, region: RegionHandle, holder: Ref, name: str, make: Allocate, checksum: int | None
    ) -> RegionHandle:
        there = await holder.ask(Borrow(region=region))
        copy = await self._allocate(name, region.nbytes, make)
        try:
            found = await self._thread.run(self._desk.read(copy.buffer, there, checksum is not None))
            if found != checksum:
                raise Corrupt(name, f"has checksum {found:#x}, not {checksum:#x}, of {region.name}")
            # It takes as long as to free the memory. Where the thread is not quite through it ends with the
            # last view of it.
            with contextlib.suppress(BufferError):
                await asyncio.to_thread(copy.close)
        except BaseException:
            # Not closed: the error still sees the memory, and its end is that of the mapping.
            self.free(copy.handle)
            raise
        return copy.handle

    async def _allocate(self, name: str, nbytes: int, make: Allocate) -> Region:
        """In a thread: it takes the kernel a second for some GB."""
        with contextlib.suppress(RegionError):
            self.shared.rename(_handle(self._spare, nbytes), name)
        making = asyncio.get_running_loop().run_in_executor(None, make, name, nbytes)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._forget)
            raise

    def _forget(self, made: asyncio.Future[Region]) -> None:
        if made.exception() is None:
            self.free(made.result().handle)

    def free(self, copy: RegionHandle) -> None:
        """One that was fetched; nobody has it open. Its memory waits for the next of its size: to find and
        clear as much takes longer than to fetch it."""
        with contextlib.suppress(RegionError):
            self.shared.rename(copy, self._spare)

    async def close(self) -> None:
        await asyncio.to_thread(self.shared.free, _handle(self._spare, 0))
        if self._thread.started:
            await self._thread.run(self._desk.close())
            await self._thread.close()
        await asyncio.to_thread(self._held.close)


class _Lent(NamedTuple):
    region: RegionHandle
    file: Attached
    registration: Registered


class _Desk:
    """What belongs on the loop of the thread."""

    def __init__(self, shared: SharedMemory, where: str, token: bytes) -> None:
        self._shared = shared
        self._backend = TcpBackend(where, token)
        self._started = False
        self._lent: dict[str, _Lent] = {}
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()
        self._sweeping: asyncio.Task[None] | None = None
        self._taken_back: set[asyncio.Task[None]] = set()

    async def lend(self, region: RegionHandle) -> RegionHandle:
        async with self._lock:
            await self._start()
            lent = self._lent.get(region.name)
            if lent is None or lent.region != region or not self._shared.has(region, lent.file):
                self._take_back(region.name)
                file = self._shared.attach(region, writable=False)
                registration = await self._backend.register(f"lent-{next(self._numbers)}", file.view())
                lent = self._lent[region.name] = _Lent(region, file, registration)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep(), name="sweep what is lent")
        return lent.registration.handle

    async def read(self, copy: memoryview, there: RegionHandle, summing: bool) -> int | None:
        """Fills it; with `summing` the `page_sum` of what came. Parts are looked at as soon as they are
        there, while others come."""
        async with self._lock:
            await self._start()
        local = await self._backend.register(f"fetched-{next(self._numbers)}", copy)
        parts = {at: copy[at : at + PART_BYTES] for at in range(0, len(copy), PART_BYTES)}
        left = iter(parts)
        sums: dict[int, bytes] = {}

        async def bring() -> None:
            for at in left:
                extent = Extent(at, at, len(parts[at]))
                await self._backend.read(local, there, [extent], timeout_s=PART_TIMEOUT_S)
                if summing:
                    sums[at] = await asyncio.to_thread(sums_of, parts[at])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(parts), CONNECTIONS)):
                    group.create_task(bring())
        except* RegionError as errors:
            raise errors.exceptions[0] from None
        finally:
            await local.close()
        return checksum_of(sums[at] for at in parts) if summing else None

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        for name in [*self._lent]:
            self._take_back(name)
        await asyncio.gather(*self._taken_back)
        await self._backend.close()

    async def _start(self) -> None:
        if not self._started:
            await self._backend.start()
            self._started = True

    async def _sweep(self) -> None:
        while self._lent:
            await asyncio.sleep(SWEEP_S)
            for name, lent in [*self._lent.items()]:
                if not self._shared.has(lent.region, lent.file):
                    self._take_back(name)
        self._sweeping = None

    def _take_back(self, name: str) -> None:
        """Whoever still reads it is not waited for here."""
        lent = self._lent.pop(name, None)
        if lent is not None:
            task = asyncio.get_running_loop().create_task(_end(lent), name=f"take {name} back")
            self._taken_back.add(task)
            task.add_done_callback(self._taken_back.discard)


async def _end(lent: _Lent) -> None:
    await lent.registration.close()
    lent.file.close()


def _handle(name: str, nbytes: int) -> RegionHandle:
    return RegionHandle(backend="shm", name=name, nbytes=nbytes)
