"""Tasks of another format, played by a job as its own are."""

import re
from pathlib import Path

import pytest

from gyre.harness.actor import HarnessActorConfig, check_walls
from gyre.harness.config import EvalConfig, EvaluatorConfig, HarnessConfig, LimitsConfig, TasksConfig
from gyre.harness.formats import load_task
from gyre.harness.sandbox import limits_of
from gyre.harness.task import TasksError
from tests.harness.conftest import needs_bwrap
from tests.harness.formats.folders import HARBOR, OURS, write
from tests.harness.neighbours import running

LOOK = "pwd; echo $MODE $LANGUAGE; ls; cat data/a.csv; ls /tests; echo hello > greeting.txt"


@needs_bwrap
async def test_a_harbor_task_is_played_where_its_image_says(tmp_path: Path) -> None:
    write(tmp_path / "tasks" / "greet", HARBOR)
    config = HarnessActorConfig(
        harness=HarnessConfig(command=("sh", "-c", LOOK), refills=0),
        tasks=TasksConfig(path=tmp_path / "tasks"),
        evaluator=EvaluatorConfig(own=True),
        eval=EvalConfig(bundled=("double",)),
        group_size=1,
        run_dir=tmp_path / "run",
    )
    async with running(config) as job:
        await job.dispatch()
        (result,) = await job.results(1)
        said = job.file("g000000.00", "harness.log").read_text()
    assert (result.score, result.reason, result.exit_code) == (1.0, "completed", 0)
    assert said.splitlines()[:2] == ["/app", "fast en us"]
    assert said.split()[5:10] == ["given.txt", "notes.txt", "out", "1", "ls:"], said
    assert re.search(r"/tests.*No such file", said)


def test_the_lesser_limit_holds(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "greet", HARBOR))
    limits = limits_of(HarnessConfig(limits=LimitsConfig(memory_bytes=1 << 30)), task)
    assert (limits.memory_bytes, limits.disk_bytes) == (1 << 30, 1 << 30)
    limits = limits_of(HarnessConfig(limits=LimitsConfig(memory_bytes=1 << 40)), task)
    assert limits.memory_bytes == 2 << 30


def test_a_place_of_its_own_needs_walls(tmp_path: Path) -> None:
    ours, theirs = load_task(write(tmp_path / "a", OURS)), load_task(write(tmp_path / "b", HARBOR))
    check_walls([ours], "process")
    check_walls([ours, theirs], "bubblewrap")
    with pytest.raises(
        TasksError, match=r"b: has its workspace at /app; set harness\.sandbox to 'bubblewrap'"
    ):
        check_walls([ours, theirs], "process")
