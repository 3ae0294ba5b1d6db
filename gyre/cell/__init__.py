"""A unit of GPUs that changes role: the CellActor, its rank workers, its engines and its training.

What is exported here needs no torch; `worker`, `model`, `weights`, `group` and `train` run in rank processes.
"""

from gyre.cell.actor import CellActor, CellActorConfig
from gyre.cell.config import (
    CellsConfig,
    CheckpointConfig,
    ClusterConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
    WarmStartConfig,
)

__all__ = [
    "CellActor",
    "CellActorConfig",
    "CellsConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "ModelConfig",
    "RolloutConfig",
    "TrainConfig",
    "WarmStartConfig",
]
