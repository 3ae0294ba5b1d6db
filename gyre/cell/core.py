"""The core's part of a CellActor: snapshots, the sum of contributions, the update, checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from gyre.actors import ActorError, Ask, Ref
from gyre.cell.checkpoints import CheckpointFolder
from gyre.cell.messages import Manifest, Snapshot, SnapshotKind, StepCommitted, StepComplete
from gyre.cell.publishing import LEASE_S, RunTask, Snapshots
from gyre.cell.pulling import load_training
from gyre.cell.ranks import AskRanks
from gyre.cell.training import accept, staged_names
from gyre.cell.worker_messages import (
    AddOwn,
    AddShard,
    CellSetup,
    CheckShard,
    CommitStep,
    HoldSnapshots,
    Updated,
    WarmStart,
    WriteCheckpoint,
    WriteSnapshot,
)
from gyre.rdma import Lending, RegionError, RegionHandle, SharedMemory

log = structlog.get_logger()

CHECKPOINT_READER = -1


class AskRank(Protocol):
    def __call__(self, rank: int, message: Ask[Any]) -> Awaitable[Any]: ...


class Core:
    """Commits are serial with adding: a contribution is added to the step it was accepted for."""

    def __init__(
        self,
        setup: CellSetup,
        queue: Ref,
        ranks: AskRanks,
        rank: AskRank,
        run: RunTask,
        lease_s: float = LEASE_S,
    ) -> None:
        """`run`: a task of the actor that this is a part of."""
        self._setup = setup
        self._queue = queue
        self._ranks = ranks
        self._rank = rank
        self._adding = asyncio.Lock()
        self._committed_by_cell: dict[int, int] = {}
        self._added: list[Manifest] = []
        self._staging: set[str] = set()
        self._shared = SharedMemory(setup.shm_folder)
        # Whoever joins from another machine copies them.
        checksums = setup.cluster.listen is not None
        self.snapshots = Snapshots(self._shared, run, checksums=checksums, lease_s=lease_s)
        self._checkpoints = CheckpointFolder(setup.checkpoint_folder, setup.checkpoint.keep)

    @property
    def step(self) -> int:
        """Committed steps: the training version."""
        return self.snapshots.training

    async def first_snapshot(self, step: int, *, resumed: bool) -> None:
        """Warm-starts where the job says so, once in its lives; version `step` is published."""
        if not resumed and self._setup.model.warm_start is not None:
            began = time.monotonic()
            losses = await self._ranks(WarmStart())
            log.info("warm_start", loss=losses[0], seconds=round(time.monotonic() - began, 1))
        (first, *_) = await self._ranks(WriteSnapshot(version=step))
        memory = await self.snapshots.start(step, first)
        await self._ranks(HoldSnapshots(regions=memory))
        self.snapshots.open()

    # --- contributions ----------------------------------------------------------------------------

    async def contribute(self, manifest: Manifest) -> bool:
        """The core's own gradients: journalled like any, added in place."""
        async with self._adding:
            if not await accept(self._queue, manifest):
                return False
            await self._ranks(AddOwn())
            self._count(manifest)
            return True

    async def stage(self, manifest: Manifest, regions: tuple[RegionHandle, ...]) -> bool:
        """A satellite's: checked on all ranks, journalled, then added. Answers whether it counts; frees the
        regions. Must not be cut short: what the queue has accepted has to be in the sum."""
        names = {region.name for region in regions}
        self._staging |= names
        try:
            async with self._adding:
                if manifest in self._added:  # it came twice
                    return True
                if not await self._is_whole(manifest, regions) or not await accept(self._queue, manifest):
                    return False
                for rank, region in enumerate(regions):
                    await self._rank(rank, AddShard(region=region))
                self._count(manifest)
                return True
        finally:
            await self._free(regions)
            self._staging -= names

    async def forget(self, cell: int) -> None:
        """A new life of that cell is here: what the one before has staged and could not tell of is freed."""
        await asyncio.to_thread(self._shared.free_all, staged_names(cell), but=self._staging)

    async def fetch(
        self, manifest: Manifest, regions: tuple[RegionHandle, ...], holder: Ref, lending: Lending
    ) -> bool:
        """Stages a contribution that is on another machine. One that does not come counts for nothing."""
        here: list[RegionHandle] = []
        try:
            for region in regions:
                here.append(await lending.fetch(region, holder, region.name))
        except (ActorError, RegionError) as error:
            await self._free(here)
            log.warning("contribution_lost", cell=manifest.cell, step=manifest.step, reason=str(error))
            return False
        return await self.stage(manifest, tuple(here))

    async def _is_whole(self, manifest: Manifest, regions: tuple[RegionHandle, ...]) -> bool:
        checks = [CheckShard(region=r, checksum=c) for r, c in zip(regions, manifest.checksums, strict=False)]
        whole = [await self._rank(rank, check) for rank, check in enumerate(checks)]
        if len(whole) == len(regions) == self._setup.cells.ranks and all(whole):
            return True
        log.warning("contribution_corrupt", cell=manifest.cell, step=manifest.step, ranks=whole)
        return False

    async def commit(self, complete: StepComplete) -> int:
        """Scale, clip, update, snapshot; tells the queue. Answers the new version."""
        async with self._adding:
            began = time.monotonic()
            version = complete.step + 1
            await self.snapshots.room(version)
            scale = 1.0 / max(complete.executions, 1)
            updates: list[Updated] = await self._ranks(CommitStep(version=version, scale=scale))
            self.snapshots.add(version, updates[0].region)
            committed = StepCommitted(
                step=complete.step,
                version=version,
                grad_norm=updates[0].grad_norm,
                lr=updates[0].lr,
                seconds=round(time.monotonic() - began, 4),
                stats=complete.stats,
                cells=complete.cells,
                micro_steps_by_cell=self._committed_by_cell,
            )
            self._committed_by_cell = {}
            self._added = []
        await self._queue.tell(committed)
        return version

    async def pull(self, version: int) -> int:
        """The core trains what it has updated itself; after a return it pulls like any cell."""
        return await load_training(self, self._ranks)

    # --- weights ----------------------------------------------------------------------------------

    async def lease(self, kind: SnapshotKind) -> Snapshot:
        """For the core's own ranks, until `release`."""
        return await self.snapshots.lease(0, kind)

    async def release(self, snapshot: Snapshot) -> None:
        self.snapshots.release(snapshot.lease)

    # --- checkpoints ----------------------------------------------------------------------------

    async def save_checkpoint(self) -> Path:
        """Writes the last committed step beside its place, then moves it there."""
        async with self._adding:
            step = self.step
            folder = await asyncio.to_thread(self._checkpoints.begin, step)
            snapshot = await self.snapshots.lease(CHECKPOINT_READER, "training")
            try:
                await self._ranks(WriteCheckpoint(folder=folder, region=snapshot.region))
                return await asyncio.to_thread(self._checkpoints.finish, folder, step)
            except BaseException:
                # On a full disk the journal waits for the room that it takes.
                await asyncio.to_thread(self._checkpoints.discard, folder)
                raise
            finally:
                self.snapshots.release(snapshot.lease)

    def _count(self, manifest: Manifest) -> None:
        self._added.append(manifest)
        done = self._committed_by_cell.get(manifest.cell, 0)
        self._committed_by_cell[manifest.cell] = done + len(manifest.micro_steps)

    async def _free(self, regions: Sequence[RegionHandle]) -> None:
        await asyncio.to_thread(self._shared.free, *regions)
