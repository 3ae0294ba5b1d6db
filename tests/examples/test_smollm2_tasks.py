"""The tasks of examples/smollm2.toml, scored as the job scores them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gyre.harness.evaluator import Evaluator, Left
from gyre.harness.sandbox import Limits, ProcessSandbox
from gyre.harness.tasks import Task, load_tasks
from gyre.job import load_job

JOB = load_job(Path(__file__).parents[2] / "examples" / "smollm2.toml")
assert JOB.tasks.path is not None
TASKS = {task.name: task for task in load_tasks(JOB.tasks.path)}
each_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def in_fences(prompt: str, language: str) -> str:
    """What the prompt shows in that language."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", prompt, re.DOTALL)
    assert isinstance(text, str)
    return text


def make_workspace(task: Task, folder: Path) -> Path:
    return shutil.copytree((task.folder / "workspace"), folder / "workspace")


def run_script(script: str, workspace: Path) -> str:
    """As mini-swe-agent does; returns what it printed."""
    return subprocess.run(
        ["/bin/sh", "-c", script], cwd=workspace, check=True, capture_output=True, text=True
    ).stdout


async def score(task: Task, workspace: Path) -> float:
    evaluator = Evaluator(JOB.evaluator, ProcessSandbox(), Limits(file_bytes=1 << 20))
    folder = workspace.parent
    return await evaluator.score(
        Left(
            execution="x",
            workspace=workspace,
            task=task.folder,
            folder=folder,
            mark=f"gyre-tests-{os.getpid()}/",
        )
    )


def test_there_are_tasks_for_two_steps_without_repetition() -> None:
    assert len(TASKS) >= JOB.train.steps * JOB.train.groups_per_step


@each_task
def test_prompt_shows_the_file_that_is_in_the_workspace(task: Task) -> None:
    code = ((task.folder / "workspace") / f"{task.name}.py").read_text()
    assert in_fences(task.prompt, "python") == code


@each_task
def test_hidden_tests_are_not_in_the_workspace(task: Task) -> None:
    assert [path.name for path in (task.folder / "tests").glob("test_*.py")]
    assert not list((task.folder / "workspace").rglob("test*"))


@each_task
async def test_untouched_workspace_scores_one_test_of_five(task: Task, tmp_path: Path) -> None:
    assert await score(task, make_workspace(task, tmp_path)) == pytest.approx(0.2)


@each_task
async def test_repair_that_the_prompt_shows_scores_one(task: Task, tmp_path: Path) -> None:
    workspace = make_workspace(task, tmp_path)
    printed = run_script(in_fences(task.prompt, "bash"), workspace)
    assert printed == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"
    assert await score(task, workspace) == 1.0


async def test_each_repair_counts_by_itself(tmp_path: Path) -> None:
    task = TASKS["shop"]
    workspace = make_workspace(task, tmp_path)
    commands = re.findall(r"^sed .*$", task.prompt, re.MULTILINE)
    scores = []
    for command in commands:
        run_script(command, workspace)
        scores.append(await score(task, workspace))
    assert scores == pytest.approx([0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("damage", ["echo 'def (' > shop.py", "rm shop.py"])
async def test_damage_is_a_zero_and_no_failed_evaluation(tmp_path: Path, damage: str) -> None:
    task = TASKS["shop"]
    workspace = make_workspace(task, tmp_path)
    run_script(damage, workspace)
    assert await score(task, workspace) == 0.0


async def test_files_that_pytest_reads_do_not_help(tmp_path: Path) -> None:
    """A conftest.py or a configuration in the workspace is none of the tests'."""
    task = TASKS["shop"]
    workspace = make_workspace(task, tmp_path)
    skip_all = "def pytest_collection_modifyitems(items): del items[:-1]"
    (workspace / "conftest.py").write_text(skip_all)
    (workspace / "pytest.ini").write_text("[pytest]\naddopts = -k test_double\n")
    assert await score(task, workspace) == pytest.approx(0.2)
