from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre.cli import app
from gyre.recorded import RecordedRun
from gyre.recorded.rescore import Rescored, rescore
from gyre.recorded.show import overridden
from tests.recorded.folders import JOB, group_of, tidy, write_run

COUNT = "ls {workspace} | wc -l | awk '{print $1 / 4}'"


def evaluator(script: str) -> str:
    return f"evaluator.command={json.dumps(['sh', '-c', script])}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of four executions the last one's workspace was not kept; the third was dropped."""
    calls = [tidy(f"g000000.{index:02d}") for index in range(4)]
    folder = write_run(tmp_path / "small", group_of("g000000", [1.0, 0.5, None, 0.0], calls))
    (folder / "job.toml").write_text(
        f'{JOB}[evaluator]\nsandbox = "process"\nattempts = 1\ncommand = ["sh", "-c", {json.dumps(COUNT)}]\n'
    )
    (folder / "tasks" / "train" / "task-0").mkdir(parents=True)
    for index in range(3):
        workspace = folder / "executions" / f"g000000.{index:02d}" / "workspace"
        workspace.mkdir(parents=True)
        for name in "abcd"[: index + 1]:
            (workspace / name).write_text("")
    return folder


def rescored(*arguments: object) -> tuple[int, list[str], str]:
    result = CliRunner().invoke(app, ["rescore", *map(str, arguments)])
    return result.exit_code, result.stdout.splitlines(), result.stderr


def test_kept_workspaces_are_scored_again_and_stay_as_they_were(run: Path) -> None:
    before = sorted(str(path) for path in run.rglob("*"))
    code, rows, err = rescored(run, "--json")
    assert code == 0
    scores = [(row["was"], row["score"]) for row in map(json.loads, rows)]
    assert scores == [(1.0, 0.25), (0.5, 0.5), (None, 0.75)]
    assert "1 execution cannot be scored: their workspaces were not kept (harness.keep" in err
    assert sorted(str(path) for path in run.rglob("*")) == before
    _, rows, _ = rescored(run)
    assert rows[-1] == "3 scored, 2 of them otherwise than before, 0 evaluations failed"


def test_another_evaluator_that_fails_says_why(run: Path) -> None:
    code, rows, _ = rescored(run, "--set", evaluator("echo no score; exit 3"), "--json")
    first = json.loads(rows[0])
    assert (code, first["score"]) == (0, None)
    assert "its last line is no number: 'no score'; exit code 3" in first["detail"]


def test_without_any_workspace_it_says_what_to_do(run: Path) -> None:
    shutil.rmtree(run / "executions")
    code, _, err = rescored(run)
    assert code == 2
    assert "4 executions cannot be scored" in err
    assert "harness.keep = true" in err


def test_keys_of_other_tables_are_refused(run: Path) -> None:
    code, _, err = rescored(run, "--set", "harness.keep=true")
    assert (code, "allowed: evaluator.*" in err) == (2, True)


def test_one_that_lasts_holds_up_nobody_else(run: Path) -> None:
    """The first waits for the last of three, two at a time."""
    last = run.parent / "last"
    os.mkfifo(last)
    script = f"case $(ls {{workspace}} | wc -l) in 1) cat {last};; 3) echo 1 > {last};; esac; echo 1"
    code, rows, _ = rescored(run, "--set", evaluator(script), "--concurrent", 2, "--json")
    assert code == 0
    assert [(row["execution"], row["score"]) for row in map(json.loads, rows)] == [
        (f"g000000.{index:02d}", 1.0) for index in range(3)
    ]


async def test_where_one_raises_nothing_of_the_others_is_left(run: Path) -> None:
    """The second is told of when the first is; the third is in the midst of its evaluation."""
    begun = run.parent / "begun"
    os.mkfifo(begun)
    script = (
        f"case $(ls {{workspace}} | wc -l) in 1) cat {begun};; 3) echo $$ > {begun}; sleep 60;; esac; echo 1"
    )
    job = overridden(run, [evaluator(script)], "evaluator.")

    def full(_: Rescored) -> None:
        raise OSError("no space left on device")

    with RecordedRun(run) as recorded, pytest.raises(OSError, match="no space"):
        await rescore(recorded, job, 3, None, Counter(), full)
    assert asyncio.all_tasks() == {asyncio.current_task()}
