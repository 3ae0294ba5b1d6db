"""RankWorker: one rank of a cell, in a process of its own. All torch work is on its device thread."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from gyre.actors import Actor, handles
from gyre.cell.engine.base import Chunk, Engine, EngineAsleep, KvManifest, KvRested
from gyre.cell.engine.make import kv_name
from gyre.cell.engine.sampled import SampledLeg
from gyre.cell.messages import (
    Abort,
    EndSession,
    ExportKv,
    ForgetSession,
    Generate,
    ImportKv,
    ReleaseKv,
    RestKv,
)
from gyre.cell.model import pick_device, use_device
from gyre.cell.rank import Rank
from gyre.cell.worker_messages import (
    AddOwn,
    AddShard,
    BeginTraining,
    BuildGroup,
    CheckShard,
    CommitStep,
    DropGradients,
    DropGroup,
    EndTraining,
    GetRankStatus,
    HoldSnapshots,
    Loaded,
    LoadModel,
    RankStatus,
    SleepEngine,
    StagedShard,
    StageGradients,
    TrainMicroStep,
    Updated,
    UpdateEngine,
    WakeEngine,
    WarmStart,
    WorkerConfig,
    WriteCheckpoint,
    WriteSnapshot,
)
from gyre.loss import MicroStepStats
from gyre.rdma import Backend, BackendName, RegionHandle, SharedMemory, start_backend

R = TypeVar("R")


class RankWorker(Actor):
    """Passes messages on to its `Rank` and calls to its engine."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        setup = config.setup
        device = self._device = pick_device(setup.cluster.device, config.slot, config.rank, setup.cells.ranks)
        self._thread = ThreadPoolExecutor(1, "device", initializer=partial(use_device, device))
        self._backend: Backend
        self._rank = Rank(config, device, self._thread)

    async def started(self) -> None:
        setup, node = self._config.setup, self.context.node
        torch.set_num_threads(setup.cluster.threads_per_rank)
        transport = node.transport
        beyond = setup.cluster.listen is not None
        # The pools of several ranks are on GPUs of their own.
        direct = self._device.type == "cuda" and not setup.engine_over_ranks
        name: BackendName = "tcp" if beyond else "cuda_ipc" if direct else "shm"
        where = transport.where if transport.scheme in ("tcp", "ucx") else "127.0.0.1"
        shared = SharedMemory(setup.shm_folder, kv_name(self._config.cell, self._config.rank))
        # A life that was killed could not.
        shared.sweep_own()
        self._backend = await start_backend(
            name, where=where, token=node.token, shared=shared, device=self._device.index or 0
        )

    async def stopping(self) -> None:
        if (engine := self._rank.engine) is not None:
            await engine.close()
        await self._backend.close()
        await self._on_device(self._rank.close)
        self._thread.shutdown(wait=False)

    def summary(self) -> Mapping[str, Any]:
        status = self._rank.status()
        engine = status.engine
        return {
            "calls_running": engine.running,
            "calls_waiting": engine.waiting,
            "kv_blocks_used": engine.kv_blocks_used,
            "kv_blocks_total": engine.kv_blocks_total,
            "generated_tokens": engine.generated_tokens,
            "trained_tokens": status.trained_tokens,
            "busy_s": round(engine.busy_s + status.train_busy_s, 3),
        }

    # --- calls ----------------------------------------------------------------------------------

    @handles(Generate)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        async for chunk in self._engine().generate(message.request):
            yield chunk

    @handles(Abort, concurrent=True)
    async def abort(self, message: Abort) -> None:
        await self._engine().abort(message.call)

    @handles(EndSession, concurrent=True)
    async def end_session(self, message: EndSession) -> tuple[SampledLeg, ...]:
        return await self._engine().end_session(message.session)

    @handles(ForgetSession, concurrent=True)
    async def forget_session(self, message: ForgetSession) -> None:
        if (engine := self._rank.engine) is not None:
            engine.forget_session(message.session)

    @handles(ExportKv, concurrent=True)
    async def export_kv(self, message: ExportKv) -> KvManifest:
        return await self._engine().export_kv(message.session, message.lease_s, message.call)

    @handles(ImportKv, concurrent=True)
    async def import_kv(self, message: ImportKv) -> int:
        return await self._engine().import_kv(message.manifest)

    @handles(ReleaseKv, concurrent=True)
    async def release_kv(self, message: ReleaseKv) -> bool:
        return await self._engine().release_kv(message.pin)

    @handles(RestKv, concurrent=True)
    async def rest_kv(self, message: RestKv) -> KvRested:
        return await self._engine().rest_kv(message.sessions, message.budget_s)

    # --- life and role ----------------------------------------------------------------------------

    @handles(LoadModel)
    async def load_model(self, message: LoadModel) -> Loaded:
        # What is there now stays; a collection that looks at all of torch takes tenths of a second.
        gc.disable()
        try:
            loaded = await self._on_device(partial(self._rank.load, message.checkpoint, self._backend))
        finally:
            gc.enable()
        gc.collect()
        gc.freeze()
        if (engine := self._rank.engine) is not None:
            self.context.run(engine.watch(), name="engine")
        return loaded

    @handles(HoldSnapshots)
    async def hold_snapshots(self, message: HoldSnapshots) -> None:
        await self._on_device(partial(self._rank.hold, message.regions))

    @handles(WarmStart)
    async def warm_start(self, message: WarmStart) -> float:
        return await self._on_device(self._rank.warm_start)

    @handles(BuildGroup)
    async def build_group(self, message: BuildGroup) -> None:
        await self._on_device(partial(self._rank.meet, message))

    @handles(DropGroup)
    async def drop_group(self, message: DropGroup) -> None:
        await self._on_device(self._rank.part)

    @handles(SleepEngine)
    async def sleep_engine(self, message: SleepEngine) -> None:
        if (engine := self._rank.engine) is not None:
            await engine.sleep()

    @handles(WakeEngine)
    async def wake_engine(self, message: WakeEngine) -> None:
        if (engine := self._rank.engine) is not None:
            await engine.wake(self._rank.weights(message.version, message.region))

    @handles(UpdateEngine)
    async def update_engine(self, message: UpdateEngine) -> None:
        if (engine := self._rank.engine) is not None:
            await engine.update(self._rank.weights(message.version, message.region))

    @handles(BeginTraining)
    async def begin_training(self, message: BeginTraining) -> None:
        await self._on_device(partial(self._rank.begin_training, message.region))

    @handles(EndTraining)
    async def end_training(self, message: EndTraining) -> None:
        await self._on_device(self._rank.end_training)

    # --- micro-steps, contributions, updates --------------------------------------------------------

    @handles(TrainMicroStep)
    async def train_micro_step(self, message: TrainMicroStep) -> MicroStepStats:
        return await self._on_device(partial(self._rank.micro_step, message.micro_step))

    @handles(DropGradients)
    async def drop_gradients(self, message: DropGradients) -> None:
        await self._on_device(self._rank.drop_gradients)

    @handles(StageGradients)
    async def stage_gradients(self, message: StageGradients) -> StagedShard:
        return await self._on_device(partial(self._rank.stage, message.name))

    @handles(CheckShard, concurrent=True)
    async def check_shard(self, message: CheckShard) -> bool:
        return await asyncio.to_thread(self._rank.is_whole, message.region, message.checksum)

    @handles(AddShard)
    async def add_shard(self, message: AddShard) -> None:
        await self._on_device(partial(self._rank.add_shard, message.region))

    @handles(AddOwn)
    async def add_own(self, message: AddOwn) -> None:
        await self._on_device(self._rank.add_own)

    @handles(CommitStep)
    async def commit_step(self, message: CommitStep) -> Updated:
        return await self._on_device(partial(self._rank.commit, message.version, message.scale))

    @handles(WriteSnapshot)
    async def write_snapshot(self, message: WriteSnapshot) -> RegionHandle:
        return await self._on_device(partial(self._rank.write_snapshot, message.version))

    @handles(WriteCheckpoint)
    async def write_checkpoint(self, message: WriteCheckpoint) -> None:
        await self._on_device(partial(self._rank.write_checkpoint, message.folder, message.region))

    @handles(GetRankStatus, concurrent=True)
    async def status(self, message: GetRankStatus) -> RankStatus:
        return self._rank.status()

    def _engine(self) -> Engine:
        engine = self._rank.engine
        if engine is None:
            raise EngineAsleep(f"rank {self._config.rank} has no engine: calls go to the one that leads it")
        return engine

    async def _on_device(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
