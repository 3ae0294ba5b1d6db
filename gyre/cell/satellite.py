"""A satellite's part of a CellActor: weights come from the core, gradients go to it."""

from __future__ import annotations

import asyncio

import msgspec

from gyre.actors import Ref
from gyre.cell.far import Far
from gyre.cell.messages import (
    GetSnapshot,
    GetSnapshotMemory,
    Manifest,
    ReleaseSnapshot,
    Snapshot,
    SnapshotKind,
    StageContribution,
    StepComplete,
)
from gyre.cell.pulling import load_training
from gyre.cell.ranks import AskRanks
from gyre.cell.training import ACCEPT_TIMEOUT_S, staged_name, staged_names
from gyre.cell.worker_messages import HoldSnapshots, StagedShard, StageGradients
from gyre.rdma import Lending

LOAD_TIMEOUT_S = 1800.0


class Satellite:
    """One life of a cell whose actor is `me`. `far`: its core is on another machine, and borrows by
    `lending`."""

    def __init__(
        self, cell: int, incarnation: int, core: Ref, me: Ref, ranks: AskRanks, lending: Lending, *, far: bool
    ) -> None:
        self._cell = cell
        self._incarnation = incarnation
        self._core = core
        self._me = me
        self._ranks = ranks
        self._shared = lending.shared
        self._far = Far(lending, core, me) if far else None

    @property
    def corrupt_snapshots(self) -> int:
        """That came, and were pulled again."""
        return self._far.corrupt if self._far is not None else 0

    # --- weights ----------------------------------------------------------------------------------

    async def hold_memory(self, nbytes: int) -> None:
        """Has the ranks map what snapshots of that size will be in, once."""
        if self._far is not None:
            await asyncio.to_thread(self._shared.free_all, staged_names(self._cell))
            regions = await self._far.memory(nbytes)
        else:
            get = GetSnapshotMemory(cell=self._cell)
            regions = await self._core.ask(get, timeout_s=LOAD_TIMEOUT_S)
        await self._ranks(HoldSnapshots(regions=regions))

    async def lease(self, kind: SnapshotKind) -> Snapshot:
        """The newest of that kind, in a region of this machine, until `release`."""
        get = GetSnapshot(cell=self._cell, kind=kind, reader=self._me)
        if self._far is not None:
            return await self._far.pull(get)
        return await self._core.ask(get, timeout_s=LOAD_TIMEOUT_S)

    async def release(self, snapshot: Snapshot) -> None:
        if self._far is not None:
            await self._far.free(snapshot)
        else:
            await self._core.tell(ReleaseSnapshot(lease=snapshot.lease))

    # --- contributions ----------------------------------------------------------------------------

    async def contribute(self, manifest: Manifest) -> bool:
        """Stages the gradients of all ranks in regions and has the core add them."""
        name = staged_name(self._cell, manifest.step, f"i{self._incarnation}-t{manifest.tokens[0]}")
        shards: list[StagedShard] = await self._ranks(StageGradients(name=name))
        manifest = msgspec.structs.replace(manifest, checksums=tuple(s.checksum for s in shards))
        regions = tuple(shard.region for shard in shards)
        holder = None if self._far is None else self._me
        stage = StageContribution(manifest=manifest, regions=regions, holder=holder)
        try:
            return await self._core.ask(stage, timeout_s=ACCEPT_TIMEOUT_S)
        finally:
            if holder is not None:
                await asyncio.to_thread(self._shared.free, *regions)

    async def commit(self, complete: StepComplete) -> int:
        raise RuntimeError(f"cell {self._cell} is no core: the queue told it to commit step {complete.step}")

    async def pull(self, version: int) -> int:
        return await load_training(self, self._ranks)
