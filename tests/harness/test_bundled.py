"""The tasks that come with Gyre: a reference solution scores 1, nothing scores 0.

With GYRE_TEST_BUNDLED=1 (`make test-bundled`) all of them are tried, else one."""

import os
import shutil
from pathlib import Path

import pytest

from gyre.harness.config import EvaluatorConfig
from gyre.harness.evaluator import Evaluator
from gyre.harness.left import Left
from gyre.harness.pytest_scorer import hidden_functions
from gyre.harness.sandbox import Limits, ProcessSandbox
from gyre.harness.task import Suite, TasksError
from gyre.harness.tasks import BUNDLED, load_bundled
from tests.harness.conftest import MARK

SOLUTIONS = Path(__file__).with_name("bundled")
TASKS = {task.name: task for task in load_bundled(["all"])}
TRIED = TASKS if os.environ.get("GYRE_TEST_BUNDLED") else ("double",)


async def score(name: str, workspace: Path, folder: Path) -> float:
    left = Left(
        execution="g000000.00",
        workspace=workspace,
        task=TASKS[name].folder,
        folder=folder,
        mark=f"{MARK}{folder.name}/evaluator/",
    )
    config = EvaluatorConfig(own=True, attempts=1, timeout_s=50.0)
    return await Evaluator(config, ProcessSandbox(), Limits(file_bytes=1 << 20)).score(left)


@pytest.mark.parametrize("name", TRIED)
async def test_its_solution_scores_1(name: str, tmp_path: Path) -> None:
    shutil.copytree(SOLUTIONS / name, tmp_path / "workspace")
    assert await score(name, tmp_path / "workspace", tmp_path) == 1.0


@pytest.mark.parametrize("name", TRIED)
async def test_nothing_scores_0(name: str, tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    assert await score(name, tmp_path / "workspace", tmp_path) == 0.0


async def test_a_part_of_the_work_is_worth_a_part(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "double.py").write_text("def double(value):\n    return int(value) * 2\n")
    assert await score("double", tmp_path / "workspace", tmp_path) == 0.25


def test_each_has_hidden_tests_and_a_solution() -> None:
    assert len(TASKS) >= 12
    for name, task in TASKS.items():
        assert task.own == Suite(tests="tests")
        assert len(hidden_functions(task.folder / "tests")) >= 3
        assert any(path.suffix == ".py" for path in (SOLUTIONS / name).rglob("*"))


def test_a_task_that_is_not_there_is_named() -> None:
    with pytest.raises(TasksError, match=r"none named 'dubble'; name some of calculator, .*double.*, or all"):
        load_bundled(["dubble"])
    assert [task.name for task in load_bundled(["double", "all", "double"])][:2] == ["double", "calculator"]
    assert load_bundled([]) == ()


def test_they_lie_in_the_package() -> None:
    assert BUNDLED.parent.name == "harness"
    assert not [path for path in BUNDLED.rglob("*") if path.suffix not in ("", ".py", ".md", ".pyc")]
