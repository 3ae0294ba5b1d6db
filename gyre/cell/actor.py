"""CellActor: one cell, in a process of its own, without torch. It commands its rank workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from gyre.actors import Actor, Ask, Down, Ref, handles
from gyre.cell.core import Core
from gyre.cell.messages import (
    CellRole,
    CellStatus,
    CellUp,
    EnterRollout,
    EnterTrain,
    GetSnapshot,
    GetSnapshotMemory,
    GetStatus,
    Publish,
    ReleaseSnapshot,
    Retire,
    RoleChanged,
    RoleState,
    SaveCheckpoint,
    Snapshot,
    SnapshotKind,
    StageContribution,
    TurnBack,
    UpdateWeights,
)
from gyre.cell.publishing import LEASE_S
from gyre.cell.pulling import PULL_TIMEOUT_S, pull
from gyre.cell.ranks import rank_process, sum_metrics
from gyre.cell.role_change import RoleChange
from gyre.cell.satellite import LOAD_TIMEOUT_S, Satellite
from gyre.cell.store import Rendezvous
from gyre.cell.training import ACCEPT_TIMEOUT_S, TrainingLoop
from gyre.cell.worker_messages import (
    CellSetup,
    GetRankStatus,
    Loaded,
    LoadModel,
    RankStatus,
    WakeEngine,
    WorkerConfig,
)
from gyre.rdma import Borrow, Lending, RegionHandle, SharedMemory

T = TypeVar("T")

log = structlog.get_logger()

CHANGE_TIMEOUT_S = 600.0
MOST_FAILURES = 3


class CellActorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One cell. `stores` supervises the rendezvous store. `core` is None for the core itself, which resumes
    at `checkpoint`. `slot` is its place among the cells of its machine; `far`: the core is on another. A role
    change waits `pull_timeout_s` for weights, a commit `lease_s` for those who read an older version."""

    setup: CellSetup
    cell: int
    waterlevel: Ref
    queue: Ref
    stores: Ref
    core: Ref | None
    checkpoint: Path | None = None
    slot: int = 0
    far: bool = False
    pull_timeout_s: float = PULL_TIMEOUT_S
    lease_s: float = LEASE_S


class CellActor(Actor):
    """Changes the role of its ranks on order, runs the training loop while in train role. Cell 0 is the
    core: it also holds the snapshots, sums the contributions and updates."""

    def __init__(self, config: CellActorConfig) -> None:
        self._config = config
        self._setup = config.setup
        self._cell = config.cell
        self._ranks: list[Ref] = []
        self._role: CellRole = "rollout"
        self._changing = True
        self._version = -1
        self._loop: TrainingLoop | None = None
        self._rendezvous: Rendezvous
        self._core = (
            Core(config.setup, config.queue, self._ask_ranks, self._ask_rank, self._run_task, config.lease_s)
            if config.core is None
            else None
        )
        self._readers: set[Ref] = set()
        self._micro_steps = 0
        self._running: RoleChange | None = None
        self._unwanted: TurnBack | None = None
        self._failures_in_a_row = 0
        self._status_before: tuple[float, int, float] = (time.monotonic(), 0, 0.0)

    async def started(self) -> None:
        life = f"cell{self._cell}/life{self.context.incarnation}"
        self._rendezvous = Rendezvous(self._config.stores, life, CHANGE_TIMEOUT_S)
        # Not here: processes of all cells start side by side, and each takes seconds to import torch.
        self.context.run(self._join(), name="join")

    async def stopping(self) -> None:
        await self._lending.close()

    async def _join(self) -> None:
        """From nothing to a cell in rollout role with the published weights."""
        async with asyncio.TaskGroup() as tasks:
            spawns = [tasks.create_task(self._spawn_rank(rank)) for rank in range(self._setup.cells.ranks)]
        self._ranks = [spawn.result() for spawn in spawns]
        loaded: list[Loaded] = await self._ask_ranks(
            LoadModel(checkpoint=self._config.checkpoint), timeout_s=LOAD_TIMEOUT_S
        )
        if self._core is not None:
            await self._core.first_snapshot(loaded[0].step, resumed=self._config.checkpoint is not None)
        else:
            await self._satellite.hold_memory(loaded[0].weights_bytes)
        if self._setup.engine_over_ranks:
            await self._change().build_engine()
        snapshot = await self._part.lease("published")
        await self._ask_ranks(WakeEngine(version=snapshot.version, region=snapshot.region))
        await self._part.release(snapshot)
        self._version = snapshot.version
        self._changing = False
        capacity = self._setup.cells.capacity_executions
        up = CellUp(
            cell=self._cell,
            incarnation=self.context.incarnation,
            ref=self.context.ref,
            engines=tuple(self._ranks[:1] if self._setup.rollout.parallel == "tensor" else self._ranks),
            role="rollout",
            version=self._version,
            capacity_calls=capacity,
            window_tokens=loaded[0].window_tokens,
        )
        await self._config.waterlevel.tell(up)

    async def _spawn_rank(self, rank: int) -> Ref:
        config = WorkerConfig(
            setup=self._setup,
            cell=self._cell,
            rank=rank,
            core=self._core is not None,
            slot=self._config.slot,
        )
        ref = await self.context.spawn(rank_process(config))
        self.context.monitor(ref)
        return ref

    @handles(Down)
    async def gone(self, message: Down) -> None:
        """A reader's lease ends with it. A cell is its ranks: without one of them its group cannot go on
        (gloo cannot abort)."""
        if self._core is not None and message.ref not in self._ranks:
            self._core.snapshots.forget(message.ref)
            self._readers.discard(message.ref)
            return
        raise RuntimeError(
            f"cell {self._cell}: a rank died: {message.reason.brief}; see {message.ref.name} in"
            f" {self._setup.log_folder}"
        )

    # --- roles ----------------------------------------------------------------------------------

    @handles(EnterTrain)
    async def enter_train(self, message: EnterTrain) -> RoleChanged:
        return await self._change_role(message.change, RoleChange.to_train)

    @handles(EnterRollout)
    async def enter_rollout(self, message: EnterRollout) -> RoleChanged:
        return await self._change_role(message.change, RoleChange.to_rollout)

    @handles(TurnBack, concurrent=True)
    async def turn_back(self, message: TurnBack) -> None:
        self._unwanted = message

    @handles(UpdateWeights)
    async def update_weights(self, message: UpdateWeights) -> RoleChanged:
        changed = await self._or_crash(self._change().update())
        self._version = changed.version
        return changed

    @handles(Retire)
    async def retire(self, message: Retire) -> None:
        if self._loop is not None:
            await self._loop.leave()

    async def _change_role(
        self, change: str, run: Callable[[RoleChange], Awaitable[RoleChanged]]
    ) -> RoleChanged:
        self._changing = True
        self._running = self._change(change)
        changed = await self._or_crash(self._counted(run(self._running)))
        self._role, self._version, self._changing = changed.role, changed.version, False
        if self._loop is not None and self._loop.is_leaving:
            self._micro_steps += self._loop.micro_steps
            self._loop = None
        if changed.role == "train" and self._loop is None:
            self._loop = self._training_loop(changed.version)
            self.context.run(self._loop.run(), name="train")
        return changed

    async def _counted(self, change: Awaitable[RoleChanged]) -> RoleChanged:
        """A cell that could go back each time, and never on, is no better than one that cannot."""
        changed = await change
        self._failures_in_a_row = self._failures_in_a_row + 1 if changed.outcome == "failed" else 0
        if self._failures_in_a_row >= MOST_FAILURES:
            raise RuntimeError(
                f"cell {self._cell}: {MOST_FAILURES} role changes failed in a row: {changed.cause}"
            )
        return changed

    def _training_loop(self, version: int) -> TrainingLoop:
        return TrainingLoop(
            cell=self._cell,
            incarnation=self.context.incarnation,
            core=self._core is not None,
            version=version,
            queue=self._config.queue,
            ranks=self._ask_ranks,
            contributor=self._part,
            claim_timeout_s=ACCEPT_TIMEOUT_S,
        )

    async def _or_crash(self, change: Awaitable[RoleChanged]) -> RoleChanged:
        """A change that failed, or that whoever ordered it has given up, leaves the cell in no role: it ends,
        and its supervisor starts it anew."""
        try:
            return await change
        except asyncio.CancelledError:
            given_up = TimeoutError(f"cell {self._cell}: a role change took too long")
            self.context.run(_fail(given_up), name="role change given up")
            raise
        except Exception as error:
            self.context.run(_fail(error), name="failed role change")
            raise

    def _change(self, change: str = "") -> RoleChange:
        return RoleChange(
            self._cell,
            change,
            self._held_version,
            ranks=self._ask_ranks,
            group=self._rendezvous.next_group,
            pull=self._pull_in_time,
            release=self._part.release,
            tell=self._tell_state,
            turned_back=lambda: self._unwanted_for(change),
            training=self._loop,
            engine_over_ranks=self._setup.engine_over_ranks,
        )

    def _unwanted_for(self, change: str) -> str | None:
        return (
            self._unwanted.cause if self._unwanted is not None and self._unwanted.change == change else None
        )

    async def _tell_state(self, state: RoleState) -> None:
        if state.change:
            await self._config.waterlevel.tell(state)

    # --- what the core serves to others -------------------------------------------------------------

    @handles(GetSnapshot, concurrent=True)
    async def get_snapshot(self, message: GetSnapshot) -> Snapshot:
        snapshots, reader = self._as_core().snapshots, message.reader
        if reader is not None and reader not in self._readers:
            self._readers.add(reader)
            self.context.monitor(reader)
        return await snapshots.lease(message.cell, message.kind, reader, copied=message.copied)

    @handles(GetSnapshotMemory, concurrent=True)
    async def snapshot_memory(self, message: GetSnapshotMemory) -> tuple[RegionHandle, ...]:
        await self._as_core().forget(message.cell)
        return await self._as_core().snapshots.memory()

    @handles(ReleaseSnapshot, concurrent=True)
    async def release_snapshot(self, message: ReleaseSnapshot) -> None:
        self._as_core().snapshots.release(message.lease)

    @handles(StageContribution, concurrent=True)
    async def stage_contribution(self, message: StageContribution) -> bool:
        # In a task of its own: a sender that dies meanwhile must not keep what was accepted out of the sum.
        # If it fails the core does, for the same reason.
        core, holder = self._as_core(), message.holder
        if holder is None:
            stage = core.stage(message.manifest, message.regions)
        else:
            stage = core.fetch(message.manifest, message.regions, holder, self._lending)
        return await asyncio.shield(self.context.run(stage, name="stage"))

    @handles(Borrow, concurrent=True)
    async def lend(self, message: Borrow) -> RegionHandle:
        """To another machine: a snapshot of the core, or a satellite's gradients."""
        return await self._lending.lend(message.region)

    @handles(Publish, concurrent=True)
    async def publish(self, message: Publish) -> int:
        return self._as_core().snapshots.publish()

    @handles(SaveCheckpoint, concurrent=True)
    async def save_checkpoint(self, message: SaveCheckpoint) -> str:
        return str(await self._as_core().save_checkpoint())

    # --- looking in ---------------------------------------------------------------------------------

    def summary(self) -> Mapping[str, Any]:
        running = self._loop.micro_steps if self._loop is not None else 0
        return {
            "cell": self._cell,
            "core": self._core is not None,
            "role": self._role,
            "changing": self._changing,
            "state": self._running.state if self._running is not None else None,
            "version": self._held_version,
            "micro_steps": self._micro_steps + running,
            "corrupt_snapshots": self._satellite.corrupt_snapshots if self._core is None else 0,
        }

    @handles(GetStatus, concurrent=True)
    async def status(self, message: GetStatus) -> CellStatus:
        ranks: list[RankStatus] = await self._ask_ranks(GetRankStatus())
        tokens = sum(r.engine.generated_tokens + r.trained_tokens for r in ranks)
        busy_s = sum(r.engine.busy_s + r.train_busy_s for r in ranks) / len(ranks)
        then, tokens_then, busy_then = self._status_before
        now = time.monotonic()
        self._status_before = (now, tokens, busy_s)
        elapsed_s = max(now - then, 1e-3)
        running = self._loop.micro_steps if self._loop is not None else 0
        return CellStatus(
            cell=self._cell,
            role=self._role,
            changing=self._changing,
            version=self._held_version,
            micro_steps=self._micro_steps + running,
            tokens_per_s=(tokens - tokens_then) / elapsed_s,
            busy_fraction=min(1.0, (busy_s - busy_then) / elapsed_s),
            engine=sum_metrics([r.engine for r in ranks]),
        )

    # --- ranks, group, snapshots ----------------------------------------------------------------------

    async def _ask_ranks(self, message: Ask[Any], timeout_s: float = CHANGE_TIMEOUT_S) -> list[Any]:
        """Asks all ranks at once; the first error cancels the other asks and is raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                asks = [tasks.create_task(rank.ask(message, timeout_s=timeout_s)) for rank in self._ranks]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asks]

    async def _ask_rank(self, rank: int, message: Ask[Any]) -> Any:
        return await self._ranks[rank].ask(message, timeout_s=CHANGE_TIMEOUT_S)

    async def _pull_in_time(self, kind: SnapshotKind) -> Snapshot:
        return await pull(self._part, kind, self._config.pull_timeout_s)

    def _run_task(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        return self.context.run(work, name=name)

    @cached_property
    def _lending(self) -> Lending:
        return Lending(SharedMemory(self._setup.shm_folder), self.context.node, self.context.name)

    @cached_property
    def _satellite(self) -> Satellite:
        assert self._config.core is not None
        return Satellite(
            self._cell,
            self.context.incarnation,
            self._config.core,
            self.context.ref,
            self._ask_ranks,
            self._lending,
            far=self._config.far,
        )

    @property
    def _part(self) -> Core | Satellite:
        """In training and with weights: what differs between the core and the others."""
        return self._core if self._core is not None else self._satellite

    @property
    def _held_version(self) -> int:
        """Of the weights that it has."""
        return self._loop.version if self._loop is not None else self._version

    def _as_core(self) -> Core:
        if self._core is None:
            raise RuntimeError(f"cell {self._cell} is not the core")
        return self._core


async def _fail(error: Exception) -> None:
    raise error
