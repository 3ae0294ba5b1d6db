"""The job as one Struct, made of the rooms' own tables."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gyre.cell.config import (
    CellsConfig,
    CheckpointConfig,
    ClusterConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from gyre.harness.config import EvalConfig, EvaluatorConfig, HarnessConfig, TasksConfig
from gyre.loss.config import LossConfig
from gyre.schedule.config import ScheduleConfig
from gyre.trajectory.config import SamplingConfig
from gyre.watch.config import WatchConfig


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole job. `name` defaults to the job file's stem, `run_dir` to runs/NAME below the working
    directory; all other relative paths are relative to the job file's folder, which `{job_dir}` names
    in commands. `seed` drives what is not seeded by a table of its own."""

    name: str
    run_dir: Path
    seed: int = 0
    model: ModelConfig
    cluster: ClusterConfig = ClusterConfig()
    cells: CellsConfig = CellsConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    rollout: RolloutConfig = RolloutConfig()
    harness: HarnessConfig
    tasks: TasksConfig
    evaluator: EvaluatorConfig
    eval: EvalConfig = EvalConfig()
    train: TrainConfig = TrainConfig()
    loss: LossConfig = LossConfig()
    sampling: SamplingConfig = SamplingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()
