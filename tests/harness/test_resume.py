"""The HarnessActor beside the real TrajectoryActor and its journal, over two lives of a job."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from gyre.actors import ChildSpec, Node
from gyre.harness.actor import HarnessActor, HarnessActorConfig
from gyre.harness.config import EvalConfig, EvaluatorConfig, HarnessConfig, TasksConfig
from gyre.proxy.messages import OpenExecution
from gyre.schedule.messages import Dispatch, ExecutionFinished, ExecutionsDispatched, ExecutionStarted
from gyre.trajectory.actor import TrajectoryActor, TrajectoryActorConfig
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import AddGroup
from tests.harness.neighbours import EMPTY, Neighbours

TASKS = Path(__file__).parents[2] / "examples" / "quickstart" / "tasks.py"


@asynccontextmanager
async def life(
    run_dir: Path, code: str, groups: int, *, score: str = "echo 0.5"
) -> AsyncIterator[Neighbours]:
    """A life of the job from its start to its stop: `groups` are dispatched, `code` is the harness, `score`
    the evaluator."""
    config = HarnessActorConfig(
        harness=HarnessConfig(command=("sh", "-c", code), sandbox="process"),
        tasks=TasksConfig(recipe=f"{TASKS}:write_tasks", count=5),
        evaluator=EvaluatorConfig(command=("sh", "-c", score), sandbox="process", attempts=1),
        eval=EvalConfig(),
        group_size=2,
        run_dir=run_dir,
    )
    trees = TrajectoryActorConfig(
        sampling=SamplingConfig(), group_size=2, groups_per_step=3, micro_step_tokens=1000
    )
    beside = Neighbours(EMPTY)
    async with Journal(run_dir / "journal.db") as journal, Node(name="test") as node:
        others = await node.spawn(ChildSpec(name="beside", start=lambda: beside))
        start = partial(TrajectoryActor, trees, journal, others)
        trajectory = await node.spawn(ChildSpec(name="trajectory", start=start))
        harness = partial(HarnessActor, config, others, trajectory, others)
        ref = await node.spawn(ChildSpec(name="harness", start=harness, shutdown_s=30))
        await ref.tell(Dispatch(split="train", groups=groups, version=0, step=0))
        yield beside


def executions(beside: Neighbours, kind: type) -> list[str]:
    return sorted(message.execution for message in beside.of(kind))


async def test_a_job_that_stopped_goes_on_with_what_had_not_ended(tmp_path: Path) -> None:
    hangs = "case $GYRE_EXECUTION in *.01) sleep 100;; esac"
    async with life(tmp_path, hangs, groups=2) as beside:
        await beside.until(ExecutionFinished, 2)
    assert executions(beside, ExecutionFinished) == ["g000000.00", "g000001.00"]
    assert not beside.of(AddGroup)

    async with life(tmp_path, "true", groups=3) as beside:
        await beside.until(ExecutionFinished, 4)
        added = await beside.until(AddGroup, 3)
        (dispatched,) = beside.of(ExecutionsDispatched)
    missing = ["g000000.01", "g000001.01", "g000002.00", "g000002.01"]
    assert executions(beside, ExecutionStarted) == executions(beside, ExecutionFinished) == missing
    assert (dispatched.executions, dispatched.groups) == (4, 3)
    assert sorted(message.group for message in added) == ["g000000", "g000001", "g000002"]


async def test_a_job_that_stopped_in_a_refill_goes_on_with_its_draws(tmp_path: Path) -> None:
    """It is not dropped and refilled as often again."""
    played = f"{tmp_path}/$GYRE_EXECUTION"
    hangs_anew = f"if [ -e {played} ]; then sleep 100; fi; touch {played}"
    async with life(tmp_path, hangs_anew, groups=1, score="false") as beside:
        first = await beside.until(OpenExecution, 4)
    names = ["g000000.00", "g000000.01"]
    assert drawn_as(first) == [(name, refill) for name in names for refill in (0, 1)]

    async with life(tmp_path, "true", groups=1, score="false") as beside:
        await beside.until(ExecutionFinished, 2)
    assert drawn_as(beside.of(OpenExecution)) == [(name, 1) for name in names]


def drawn_as(opened: list[OpenExecution]) -> list[tuple[str, int]]:
    return sorted((message.execution, message.refill) for message in opened)
