"""The ranks of a cell: how their processes are started, and what they have in sum."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from gyre.actors import Ask, ProcessSpec
from gyre.cell.engine.base import EngineMetrics
from gyre.cell.worker_messages import WorkerConfig

# Of all of them, at once.
AskRanks = Callable[[Ask[Any]], Awaitable[list[Any]]]


def rank_process(config: WorkerConfig) -> ProcessSpec:
    """Not restarted: a cell is its ranks."""
    setup = config.setup
    threads = str(setup.cluster.threads_per_rank)
    return ProcessSpec(
        name=f"rank-{config.rank}",
        actor="gyre.cell.worker:RankWorker",
        config=config,
        environment={
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        },
        log_path=setup.log_folder / f"cell-{config.cell}-rank-{config.rank}.log",
        restart="temporary",
    )


def sum_metrics(metrics: list[EngineMetrics]) -> EngineMetrics:
    names = EngineMetrics.__struct_fields__
    return EngineMetrics(**{name: sum(getattr(m, name) for m in metrics) for name in names})
