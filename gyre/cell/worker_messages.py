"""The messages between a CellActor and its rank workers. Unless said, all ranks get each at once."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gyre.actors import Ask
from gyre.cell.config import (
    CellsConfig,
    CheckpointConfig,
    ClusterConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from gyre.cell.engine.base import EngineMetrics
from gyre.loss import LossConfig, MicroStep, MicroStepStats
from gyre.rdma import RegionHandle


class CellSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of every cell knows of the job."""

    model_folder: Path
    shm_folder: Path
    log_folder: Path
    checkpoint_folder: Path
    model: ModelConfig
    cluster: ClusterConfig
    cells: CellsConfig
    rollout: RolloutConfig
    train: TrainConfig
    loss: LossConfig
    checkpoint: CheckpointConfig

    @property
    def engine_over_ranks(self) -> bool:
        """Whether the ranks of a cell meet to be one native engine. SGLang's processes do so themselves."""
        return self.rollout.parallel == "tensor" and self.rollout.engine == "native" and self.cells.ranks > 1


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one cell, which is the one numbered `slot` of its machine."""

    setup: CellSetup
    cell: int
    rank: int
    core: bool
    slot: int = 0


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has: the bytes of the whole weights in compute dtype, the step its weights are of."""

    weights_bytes: int
    parameters: int
    step: int
    window_tokens: int


class LoadModel(Ask[Loaded], frozen=True, kw_only=True):
    """Build the model. The core also takes weights and optimizer: those of `checkpoint`, else the model
    folder's."""

    checkpoint: Path | None = None


class WarmStart(Ask[float], frozen=True, kw_only=True):
    """To the core's ranks before step 0: supervised training on the demonstrations. Answers the last loss."""


class BuildGroup(Ask[None], frozen=True, kw_only=True):
    """Drop what stands and meet over the store, under a prefix of its own: as the process group that trains,
    or with `engine` as one engine over all ranks."""

    host: str
    port: int
    prefix: str
    engine: bool = False


class DropGroup(Ask[None], frozen=True, kw_only=True):
    """Tear down what was built."""


class SleepEngine(Ask[None], frozen=True, kw_only=True):
    """Free the engine's weights and KV; calls still running end with `abort`."""


class WakeEngine(Ask[None], frozen=True, kw_only=True):
    """Load a snapshot into the engine and admit calls."""

    version: int
    region: RegionHandle


class UpdateEngine(Ask[None], frozen=True, kw_only=True):
    """Load a snapshot into an engine that is awake, between two forward passes."""

    version: int
    region: RegionHandle


class BeginTraining(Ask[None], frozen=True, kw_only=True):
    """Build the training module over the cell's ranks and load a snapshot into it."""

    version: int
    region: RegionHandle


class TrainMicroStep(Ask[MicroStepStats], frozen=True, kw_only=True):
    """Forward, backward, accumulate. Each rank answers for its share of the trajectories."""

    micro_step: MicroStep


class DropGradients(Ask[None], frozen=True, kw_only=True):
    """Forget what was accumulated and not handed over."""


class StagedShard(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's shard of a contribution: fp32 gradients of its part of every parameter, and their crc32."""

    region: RegionHandle
    checksum: int


class StageGradients(Ask[StagedShard], frozen=True, kw_only=True):
    """Write what was accumulated to a region and forget it."""

    name: str


class CheckShard(Ask[bool], frozen=True, kw_only=True):
    """To one rank of the core: does the region hold what its checksum says?"""

    region: RegionHandle
    checksum: int


class AddShard(Ask[None], frozen=True, kw_only=True):
    """To one rank of the core: add a satellite's shard to the step's sum."""

    region: RegionHandle


class AddOwn(Ask[None], frozen=True, kw_only=True):
    """To the core's ranks: add what they accumulated themselves to the step's sum."""


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    """The norm of the step's gradient before clipping, the learning rate used, and the new snapshot."""

    grad_norm: float
    lr: float
    region: RegionHandle


class CommitStep(Ask[Updated], frozen=True, kw_only=True):
    """To the core's ranks: scale the step's sum, clip, update, write weights `version` to a snapshot."""

    version: int
    scale: float


class HoldSnapshots(Ask[None], frozen=True, kw_only=True):
    """Map the memory that snapshots will be in, and pin it for the GPU. What is gone by then is skipped."""

    regions: tuple[RegionHandle, ...]


class WriteSnapshot(Ask[RegionHandle], frozen=True, kw_only=True):
    """To the core's ranks: write the weights as they are."""

    version: int


class EndTraining(Ask[None], frozen=True, kw_only=True):
    """Free the training module."""


class WriteCheckpoint(Ask[None], frozen=True, kw_only=True):
    """To the core's ranks: every rank its optimizer shard, rank 0 also the snapshot as a model folder."""

    folder: Path
    region: RegionHandle


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a rank since it started."""

    engine: EngineMetrics
    train_busy_s: float
    trained_tokens: int


class GetRankStatus(Ask[RankStatus], frozen=True, kw_only=True):
    """How busy a rank is."""
