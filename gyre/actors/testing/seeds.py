"""Many seeds of one scenario, and the command that replays one."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple

from gyre.actors.testing.simulation import Simulation

Scenario = Callable[[Simulation], Coroutine[Any, Any, None]]


class Run(NamedTuple):
    """What one seed came to; `fault` is empty where all held."""

    seed: int
    trace: str
    steps: int
    virtual_s: float
    fault: str


def run_seed(scenario: Scenario, seed: int) -> Run:
    """One run of a scenario."""
    simulation = Simulation(seed)
    fault = ""
    try:
        simulation.run(scenario)
    except Exception:
        fault = traceback.format_exc()
    loop = simulation.loop
    return Run(seed, loop.trace, loop.steps, loop.time(), fault)


def run_seeds(scenario: Scenario, seeds: Iterable[int]) -> list[Run]:
    """All of them; AssertionError names the first that failed and how to replay it."""
    runs = []
    for seed in seeds:
        run = run_seed(scenario, seed)
        runs.append(run)
        if run.fault:
            raise AssertionError(f"{run.fault}\nreplay: {replay(scenario, seed)}")
    return runs


def replay(scenario: Scenario, seed: int) -> str:
    """The command that runs a seed again."""
    return f"python -m gyre.actors.testing {scenario.__module__}:{scenario.__qualname__} --seed {seed}"
