"""The evaluators that tasks of all formats bring, on what a harness left."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.harness.bubblewrap import Bubblewrap
from gyre.harness.config import EvaluatorConfig
from gyre.harness.evaluator import EvaluationFailed, Evaluator
from gyre.harness.formats import load_task
from gyre.harness.left import Left
from gyre.harness.own_scorer import reward_of
from gyre.harness.sandbox import Limits, ProcessSandbox, Sandbox
from gyre.harness.score import ScoreError
from gyre.harness.task import TasksError
from gyre.harness.workspace import lay
from tests.harness.conftest import MARK, needs_bwrap
from tests.harness.formats.folders import FORMATS, HARBOR, NL2REPOBENCH, TERMINAL_BENCH, write

LIMITS = Limits(file_bytes=1 << 20)
Leave = Callable[..., Left]


@pytest.fixture
def leave(tmp_path: Path) -> Leave:
    """What a harness left of a task's workspace when it wrote these files."""

    def make(files: dict[str, str], **written: str) -> Left:
        task = load_task(write(tmp_path / "task", files))
        lay(task.parts, tmp_path / "workspace", 1 << 20)
        write(tmp_path / "workspace", written)
        return Left(
            execution="g000000.00",
            workspace=tmp_path / "workspace",
            task=task.folder,
            folder=tmp_path,
            mark=f"{MARK}{tmp_path.name}/evaluator/",
        )

    return make


def own(sandbox: Sandbox) -> Evaluator:
    return Evaluator(EvaluatorConfig(own=True, attempts=1), sandbox, LIMITS)


async def scored(left: Left, tmp_path: Path) -> float:
    sandbox = Bubblewrap(tmp_path / "sandbox")
    sandbox.check()
    evaluator = own(sandbox)
    evaluator.check([left.task])
    return await evaluator.score(left)


GREETER = {"greeter/__init__.py": "def greet(name): return 'hello x'\n"}
CASES = {
    "harbor-nothing": ("harbor", {}, 0.25),
    "terminal-bench-half": ("terminal-bench", {"greeting.txt": "bye"}, 0.5),
}


@needs_bwrap
@pytest.mark.parametrize(("name", "written", "score"), CASES.values(), ids=CASES)
async def test_what_is_left_is_worth(
    leave: Leave, tmp_path: Path, name: str, written: dict[str, str], score: float
) -> None:
    assert await scored(leave(FORMATS[name], **written), tmp_path) == score


@needs_bwrap
async def test_what_lies_in_place_of_a_test_is_worth_nothing(leave: Leave, tmp_path: Path) -> None:
    """Another test, or a link out of the workspace."""
    left = leave(NL2REPOBENCH, **GREETER, **{"greeter/tests/test_more.py": "def test_other(): pass"})
    (tmp_path / "outside").mkdir()
    os.symlink(tmp_path / "outside", left.workspace / "tests")
    assert await scored(left, tmp_path) == 0.5
    assert not list((tmp_path / "outside").iterdir())


ALL_PASSED = '<testsuite><testcase name="test_a"/></testsuite>'
DECEIT = f"open('/logs/verifier/report.xml', 'w').write({ALL_PASSED!r}); import os; os._exit(0)"
SHADOWS = dict.fromkeys(["pytest.py", "_pytest/__init__.py", "xml/__init__.py", "unittest.py"], DECEIT)
UNITTEST = """cd /app
python3 -m unittest discover -s /tests
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
FAILS = "import unittest\n\nclass Case(unittest.TestCase):\n    def test_it(self):\n        self.fail()\n"
BY = {
    "pytest": TERMINAL_BENCH,
    "unittest": {**HARBOR, "tests/test.sh": UNITTEST, "tests/test_it.py": FAILS},
}


@needs_bwrap
@pytest.mark.parametrize("files", BY.values(), ids=BY)
async def test_what_is_named_like_what_runs_the_tests_is_not_run(
    leave: Leave, tmp_path: Path, files: dict[str, str]
) -> None:
    assert await scored(leave(files, **SHADOWS), tmp_path) == 0.0


WORKS = """import subprocess
import pytest

@pytest.mark.parametrize("how", [["/app/run.py"], ["-m", "run"], ["-c", "import run"]])
def test_runs(how):
    assert subprocess.run(["python3", *how], cwd="/app", capture_output=True).stdout == b"hello\\n"

def test_imports():
    import beside
    assert beside.WORD == "hello"
"""


@needs_bwrap
async def test_the_work_under_test_finds_what_lies_beside_it(leave: Leave, tmp_path: Path) -> None:
    left = leave(
        {**TERMINAL_BENCH, "tests/test_outputs.py": WORKS},
        **{"beside.py": "WORD = 'hello'", "run.py": "import beside\nprint(beside.WORD)"},
    )
    assert await scored(left, tmp_path) == 1.0


@needs_bwrap
async def test_no_reward_is_a_failed_evaluation(leave: Leave, tmp_path: Path) -> None:
    left = leave({**HARBOR, "tests/test.sh": "echo so sad >&2; exit 7"})
    with pytest.raises(EvaluationFailed, match=r"no /logs/verifier/reward.*exit code 7.*so sad"):
        await scored(left, tmp_path)


def test_scripts_need_walls(leave: Leave) -> None:
    for files in (HARBOR, TERMINAL_BENCH):
        left = leave(files)
        with pytest.raises(TasksError, match=r"set evaluator\.sandbox to 'bubblewrap'"):
            own(ProcessSandbox()).check([left.task])
        shutil.rmtree(left.task)
        shutil.rmtree(left.workspace)


def test_a_task_without_an_evaluator_is_named(tmp_path: Path) -> None:
    task = write(tmp_path / "task", {"prompt.md": "x"})
    with pytest.raises(TasksError, match="has no evaluator of its own; put hidden tests"):
        own(ProcessSandbox()).check([task])


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1", 1.0), ("0.5", 0.5), ('{"reward": 0.25, "style": 1}', 0.25), ('{"a": 1, "b": 0}', 0.5)],
)
def test_rewards(text: str, reward: float) -> None:
    assert reward_of(text) == reward


@pytest.mark.parametrize(
    "text", ["", "yes", "2", "-0.1", "NaN", "Infinity", "true", "[1]", "{}", '{"reward": "1"}']
)
def test_no_rewards(text: str) -> None:
    with pytest.raises(ScoreError, match="its reward is no"):
        reward_of(text)


@given(st.text() | st.floats().map(str) | st.integers().map(str))
def test_any_text_is_a_reward_or_none(text: str) -> None:
    with contextlib.suppress(ScoreError):
        assert 0.0 <= reward_of(text) <= 1.0
