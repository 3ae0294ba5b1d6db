"""The ranks of a cell: how their processes are started, and what they have in sum."""

from __future__ import annotations

import os
import platform
from collections.abc import Awaitable, Callable
from typing import Any

from gyre.actors import Ask, ProcessSpec
from gyre.cell.engine.base import EngineMetrics
from gyre.cell.worker_messages import WorkerConfig

# What a fork server of ranks imports.
RANK_MODULES = ("gyre.cell.worker", "gyre.cell.engine.native", "gyre.cell.engine.follower")

# Of all of them, at once.
AskRanks = Callable[[Ask[Any]], Awaitable[list[Any]]]


def rank_process(config: WorkerConfig) -> ProcessSpec:
    """Not restarted: a cell is its ranks."""
    setup = config.setup
    return ProcessSpec(
        name=f"rank-{config.rank}",
        actor="gyre.cell.worker:RankWorker",
        config=config,
        environment=rank_environment(setup.cluster.threads_per_rank),
        log_path=setup.log_folder / f"cell-{config.cell}-rank-{config.rank}.log",
        restart="temporary",
        fork=True,
    )


def rank_environment(threads: int) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    if platform.machine() == "x86_64":  # there only numpy has it, and starts its threads when it is imported
        environment["OPENBLAS_NUM_THREADS"] = "1"
    return environment


def sum_metrics(metrics: list[EngineMetrics]) -> EngineMetrics:
    names = EngineMetrics.__struct_fields__
    return EngineMetrics(**{name: sum(getattr(m, name) for m in metrics) for name in names})
