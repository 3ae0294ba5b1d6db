"""`python -m benchmarks.trajectory [--json] [--quick] [--only plan,sharing]`.

`plan`: an execution of 500 calls and 1M tokens is built, drawn from and packed. `sharing`: for each of five
shapes of trees a step is packed and claimed: how much of what its rows share is computed once, and how even
the cells' parts are.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import inf
from time import perf_counter

import numpy as np

from benchmarks.command import chosen, parser, tell
from benchmarks.report import Report
from benchmarks.trajectory.executions import Harness, agent, line, retries
from benchmarks.trajectory.shapes import SHAPES, Shape
from gyre.loss import MicroStep, Trajectory
from gyre.trajectory import (
    CallRecord,
    PlannedGroup,
    SamplingConfig,
    ScoredExecution,
    TrajectoryTree,
    classify,
    plan_group,
)
from gyre.trajectory.config import DrawRule
from gyre.trajectory.cuts import measure

CALLS, TOKENS = 500, 1_000_000
MICRO_STEP_TOKENS = 131_072
PLAN_S, PLAN_BYTES = 1.0, 100e6
ROUNDS = 5
# A step: groups of executions, claimed by cells that are equally fast.
GROUPS, EXECUTIONS, CELLS, PROMPT_TOKENS = 32, 8, 8, 2048
SHARING_KEPT, IMBALANCE = 0.97, 0.05

Execution = Callable[[str, int, int], Iterator[CallRecord]]
LONG: dict[str, tuple[Execution, DrawRule]] = {
    "line": (line, "paper"),
    "retries": (retries, "paper"),
    "agent": (agent, "paper"),
    "agent_all": (agent, "all"),
}


def scored(execution: str, score: float, records: Iterable[CallRecord]) -> ScoredExecution:
    tree = TrajectoryTree(execution)
    for record in records:
        tree.add(record)
    return ScoredExecution(execution=execution, score=score, tree=tree, roles=classify(tree))


def planned(execution: ScoredExecution, draw: DrawRule) -> PlannedGroup:
    """In a group with one that never started."""
    nothing = TrajectoryTree("g000000.01")
    other = ScoredExecution(execution=nothing.execution, score=0.0, tree=nothing, roles=classify(nothing))
    return plan_group("g000000", 0, [execution, other], SamplingConfig(draw=draw), MICRO_STEP_TOKENS)


def measure_plan(report: Report, name: str, rounds: int, calls: int = CALLS, tokens: int = TOKENS) -> None:
    """Seconds of an execution whose records are there; bytes when each record is gone once it is in the
    tree, as in a job."""
    make, draw = LONG[name]
    records = list(make("g000000.00", calls, tokens))
    best = {"build": inf, "plan": inf, "both": inf}
    for _ in range(rounds):
        start = perf_counter()
        execution = scored("g000000.00", 1.0, records)
        built = perf_counter()
        group = planned(execution, draw)
        took = {"build": built - start, "plan": perf_counter() - built, "both": perf_counter() - start}
        best = {part: min(best[part], took[part]) for part in best}
    report.figure(f"{name}_build_s", best["build"])
    report.figure(f"{name}_sample_and_pack_s", best["plan"])
    report.figure(f"{name}_row_tokens", sum(micro_step.length_tokens for micro_step in group.micro_steps))
    del records, execution, group
    report.at_most(f"{name}_s", best["both"], PLAN_S)
    tracemalloc.start()
    try:
        _ = planned(scored("g000000.00", 1.0, make("g000000.00", calls, tokens)), draw)
        report.at_most(f"{name}_peak_bytes", tracemalloc.get_traced_memory()[1], PLAN_BYTES)
    finally:
        tracemalloc.stop()


def step_of(
    shape: Shape, groups: int, limit_tokens: int = MICRO_STEP_TOKENS
) -> Iterator[tuple[MicroStep, ...]]:
    """Of each group the micro-steps, all leaves drawn."""
    for group in range(groups):
        random = np.random.default_rng(group)
        prompt = Harness("", group).tokens(PROMPT_TOKENS)
        executions = []
        for index in range(EXECUTIONS):
            name = f"g{group:06d}.{index:02d}"
            harness = Harness(name, seed=1000 * group + index)
            executions.append(scored(name, float(index % 2), shape(harness, prompt, random)))
        config = SamplingConfig(draw="all")
        yield plan_group(f"g{group:06d}", 0, executions, config, limit_tokens).micro_steps


def loads(micro_steps: Iterable[MicroStep], cells: int) -> list[int]:
    """Of each cell the tokens, when each takes the longest that is left as it becomes free: the queue's
    order."""
    found = [0] * cells
    for micro_step in sorted(micro_steps, key=lambda micro_step: -micro_step.length_tokens):
        found[found.index(min(found))] += micro_step.length_tokens
    return found


def sharing(groups: Sequence[tuple[MicroStep, ...]], limit_tokens: int) -> tuple[float, float, float]:
    """How many times more tokens rows have than the trees of the groups; the share of the difference that
    micro-steps save, and that micro-steps filled by length save."""
    rows = trees = spent = baseline = 0
    for micro_steps in groups:
        trajectories = [t for micro_step in micro_steps for t in micro_step.trajectories]
        rows += sum(t.length_tokens for t in trajectories)
        trees += tree_tokens(trajectories)
        spent += sum(micro_step.tree_tokens for micro_step in micro_steps)
        baseline += by_length(trajectories, limit_tokens)
    return rows / trees, (rows - spent) / (rows - trees), (rows - baseline) / (rows - trees)


def by_length(trajectories: Iterable[Trajectory], limit_tokens: int) -> int:
    """The baseline: tree tokens where micro-steps of as many row tokens are filled longest first, whatever
    shares a prefix."""
    spent, packed, room = 0, list[Trajectory](), limit_tokens
    for trajectory in sorted(trajectories, key=lambda t: (-t.length_tokens, t.execution, t.leaf)):
        if trajectory.length_tokens > room:
            spent += tree_tokens(packed)
            packed, room = [], limit_tokens
        packed.append(trajectory)
        room -= trajectory.length_tokens
    return spent + tree_tokens(packed)


def tree_tokens(trajectories: Iterable[Trajectory]) -> int:
    return measure(sorted(trajectories, key=lambda t: t.token_ids)).tree_tokens


def measure_sharing(report: Report, name: str, groups: int, limit_tokens: int = MICRO_STEP_TOKENS) -> None:
    step = list(step_of(SHAPES[name], groups, limit_tokens))
    ratio, kept, baseline = sharing(step, limit_tokens)
    by_cell = loads(chain.from_iterable(step), CELLS)
    report.figure(f"{name}_rows_to_tree", ratio)
    report.figure(f"{name}_sharing_kept_by_length", baseline)
    report.figure(f"{name}_micro_steps", sum(len(micro_steps) for micro_steps in step))
    report.at_least(f"{name}_sharing_kept", kept, SHARING_KEPT)
    report.at_most(f"{name}_imbalance", max(by_cell) * CELLS / sum(by_cell) - 1, IMBALANCE)


def main() -> None:
    made = parser("trajectory", "Trees built, drawn from and packed, and what packing keeps of sharing.")
    made.add_argument("--only", metavar="PARTS", help="of plan, sharing")
    made.add_argument(
        "--micro-step-tokens",
        type=int,
        default=MICRO_STEP_TOKENS,
        metavar="TOKENS",
        help="of `sharing`; its bounds hold where a micro-step has many rows",
    )
    options = made.parse_args()
    parts = chosen(made, options.only, ("plan", "sharing"), ("plan", "sharing"))
    report = Report("trajectory")
    if "plan" in parts:
        for name in LONG:
            measure_plan(report, name, 1 if options.quick else ROUNDS)
    if "sharing" in parts:
        for name in SHAPES:
            measure_sharing(report, name, 4 if options.quick else GROUPS, options.micro_step_tokens)
    tell(report, options.json)


if __name__ == "__main__":
    main()
