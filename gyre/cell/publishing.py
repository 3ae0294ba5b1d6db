"""The core's snapshots: their memory, which is found once and used by turns, their leases and checksums."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from gyre.actors import Ref
from gyre.cell.messages import Snapshot, SnapshotKind
from gyre.cell.snapshots import MOST, SnapshotShelf
from gyre.rdma import HeldRegions, RegionError, RegionHandle, SharedMemory, page_sum

T = TypeVar("T")

log = structlog.get_logger()

# How long a commit waits for those who read a version that is neither trained under nor published.
LEASE_S = 30.0


class RunTask(Protocol):
    def __call__(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]: ...


class Snapshots:
    """Of version v, while it is needed, in the region `wv`. All is on the event loop but copying and summing:
    readers map the memory, or are served by a thread."""

    def __init__(
        self, shared: SharedMemory, run: RunTask, *, checksums: bool, lease_s: float = LEASE_S
    ) -> None:
        """`run`: a task of the actor that this is a part of. With `checksums` they are made as soon as there
        is a version, else when they are first asked for."""
        self._shared = shared
        self._run = run
        self._checksums = checksums
        self._lease_s = lease_s
        self._held = HeldRegions(shared)
        self._shelf = SnapshotShelf()
        self._spares: list[RegionHandle] = []
        self._freed = asyncio.Event()
        self._sums: dict[str, asyncio.Task[int | RegionError]] = {}
        self._ready = asyncio.Event()

    @property
    def training(self) -> int:
        return self._shelf.training

    async def start(self, version: int, region: RegionHandle) -> tuple[RegionHandle, ...]:
        """With the first version, which is written, and published. Answers the memory of all to come."""
        self._spares = await asyncio.to_thread(self._find_spares, region.nbytes)
        self.add(version, region)
        self.publish()
        return self._memory

    def open(self) -> None:
        """From now on they are leased."""
        self._ready.set()

    async def memory(self) -> tuple[RegionHandle, ...]:
        """All that there is for snapshots, by its present names, once there is a first."""
        await self._ready.wait()
        return self._memory

    @property
    def _memory(self) -> tuple[RegionHandle, ...]:
        return (*self._shelf.regions, *self._spares)

    # --- versions ---------------------------------------------------------------------------------

    async def room(self, version: int) -> None:
        """Memory for that version, under its name. Readers that hinder it are waited for a while."""
        while not self._spares:
            self._freed.clear()
            try:
                async with asyncio.timeout(self._lease_s):
                    await self._freed.wait()
            except TimeoutError:
                self._drop_readers()
        self._shared.rename(self._spares.pop(), f"w{version}")

    def add(self, version: int, region: RegionHandle) -> None:
        """It is written: the training version."""
        self._recycle(self._shelf.add(version, region))
        if self._checksums:
            self._sum(region)

    def publish(self) -> int:
        """The training version is the published one too."""
        self._recycle(self._shelf.publish())
        return self._shelf.published

    # --- readers ----------------------------------------------------------------------------------

    async def lease(
        self, cell: int, kind: SnapshotKind, reader: Ref | None = None, *, copied: bool = False
    ) -> Snapshot:
        """Waits until there is a first version, and with `copied` for the checksum. Who leases for a `reader`
        says when that is dead. Raises RegionError where there is no checksum; then nothing is leased."""
        await self._ready.wait()
        snapshot, freed = self._shelf.lease(cell, kind, reader)
        self._recycle(freed)
        if not copied:
            return snapshot
        try:
            found = await asyncio.shield(self._sum(snapshot.region))
            if isinstance(found, RegionError):
                raise found
        except BaseException:
            self.release(snapshot.lease)
            raise
        return msgspec.structs.replace(snapshot, checksum=found)

    def release(self, lease: int) -> None:
        self._recycle(self._shelf.release(lease))

    def forget(self, reader: Ref) -> None:
        """It is dead, and reads nothing any more."""
        self._recycle(self._shelf.forget(reader))

    def _drop_readers(self) -> None:
        dropped, freed = self._shelf.drop_hindering()
        for held in dropped:
            log.warning(
                "snapshot_reader_dropped", cell=held.cell, version=held.version, waited_s=self._lease_s
            )
        self._recycle(freed)

    # --- memory -----------------------------------------------------------------------------------

    def _find_spares(self, nbytes: int) -> list[RegionHandle]:
        found = []
        for number in range(1, MOST):
            with self._shared.allocate(f"spare-{number}", nbytes) as region:
                found.append(region.handle)
        return found

    def _recycle(self, regions: list[RegionHandle]) -> None:
        """Who still reads one sees by its name that what was read is not to be used."""
        for region in regions:
            self._sums.pop(region.name, None)
            self._spares.append(self._shared.rename(region, f"spare-{region.name}"))
            self._freed.set()

    def _sum(self, region: RegionHandle) -> asyncio.Task[int | RegionError]:
        if region.name not in self._sums:
            summing = self._sum_or_error(region)
            self._sums[region.name] = self._run(summing, name=f"checksum of {region.name}")
        return self._sums[region.name]

    async def _sum_or_error(self, region: RegionHandle) -> int | RegionError:
        """An error, be it that nobody needs that version any more, is for those who wait for this sum alone:
        who asks next has it summed again."""
        try:
            return await asyncio.to_thread(self._sum_now, region)
        except RegionError as error:
            self._sums.pop(region.name, None)
            return error

    def _sum_now(self, region: RegionHandle) -> int:
        with self._held.open(region) as source:
            return page_sum(source.buffer)
