from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from gyre.harness.config import EvaluatorConfig, PartConfig
from gyre.harness.evaluator import EvaluationFailed, Evaluator
from gyre.harness.left import Left
from gyre.harness.sandbox import Limits, ProcessSandbox, Sandbox
from tests.harness.conftest import MARK

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"

Score = Callable[..., Any]


@pytest.fixture
def left(tmp_path: Path) -> Left:
    for name in ("workspace", "task"):
        (tmp_path / name).mkdir()
    (tmp_path / "task" / "hidden").write_text("answer")
    (tmp_path / "workspace" / "solution").write_text("answer")
    return Left(
        execution="g000000.00",
        workspace=tmp_path / "workspace",
        task=tmp_path / "task",
        folder=tmp_path,
        mark=f"{MARK}evaluator/",
    )


@pytest.fixture
def evaluator(sandbox: Sandbox) -> Callable[..., Evaluator]:
    def make(*command: str, **settings: Any) -> Evaluator:
        return Evaluator(EvaluatorConfig(command=command, **settings), sandbox, Limits(file_bytes=1 << 20))

    return make


@pytest.fixture
def plain() -> Callable[..., Evaluator]:
    """What has nothing to do with walls is tested without them."""

    def make(*command: str, **settings: Any) -> Evaluator:
        return Evaluator(
            EvaluatorConfig(command=command, **settings), ProcessSandbox(), Limits(file_bytes=1 << 20)
        )

    return make


def python(code: str) -> tuple[str, ...]:
    return ("{python}", "-c", code, "{workspace}", "{task}", "{report}")


COMPARE = """
import sys
workspace, task = sys.argv[1:3]
print("comparing")
print(float(open(workspace + "/solution").read() == open(task + "/hidden").read()))
"""


async def test_the_workspace_is_compared_with_what_is_hidden(evaluator: Score, left: Left) -> None:
    assert await evaluator(*python(COMPARE)).score(left) == 1.0
    (left.workspace / "solution").write_text("wrong")
    assert await evaluator(*python(COMPARE)).score(left) == 0.0


async def test_a_copy_is_evaluated_and_removed(evaluator: Score, left: Left) -> None:
    code = "import os, sys; os.remove(sys.argv[1] + '/solution'); open('more', 'w').close(); print(1)"
    assert await evaluator(*python(code)).score(left) == 1.0
    assert [path.name for path in left.workspace.iterdir()] == ["solution"]
    assert not (left.folder / "evaluation").exists()


async def test_a_file_that_the_command_names_is_there(evaluator: Score, left: Left) -> None:
    command = ("{python}", "-I", "-S", str(QUICKSTART / "evaluate.py"), "{workspace}")
    assert await evaluator(*command).score(left) == 0.0


async def test_a_score_counts_whatever_the_exit_code(evaluator: Score, left: Left) -> None:
    assert await evaluator(*python("print(0.5); raise SystemExit(1)")).score(left) == 0.5


FAILURES = [
    ("raise SystemExit(3)", "printed nothing; exit code 3"),
    ("print('garbage')", "no number: 'garbage'"),
    ("print('nan')", "no number: 'nan'"),
    ("print(1.01)", r"not in \[0, 1\]: 1.01"),
    ("1/0", "it said 'ZeroDivisionError"),
    ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
    ("import sys; sys.stdout.buffer.write(b'\\xff' * 100000)", "no number"),
]


@pytest.mark.parametrize(("code", "reason"), FAILURES)
async def test_a_failure_is_no_score(plain: Score, left: Left, code: str, reason: str) -> None:
    with pytest.raises(EvaluationFailed, match=reason):
        await plain(*python(code), attempts=1).score(left)


async def test_an_evaluator_that_hangs_is_no_score(plain: Score, left: Left) -> None:
    code = "import time; print(1, flush=True); time.sleep(100)"
    with pytest.raises(EvaluationFailed, match=r"did not end within 0\.4 s"):
        await plain(*python(code), attempts=1, timeout_s=0.4).score(left)


async def test_an_evaluator_that_is_not_there_is_no_score(plain: Score, left: Left) -> None:
    with pytest.raises(EvaluationFailed, match="no-such-program"):
        await plain("no-such-program", attempts=1).score(left)


async def test_a_workspace_that_is_too_large_is_a_zero(plain: Score, left: Left) -> None:
    with (left.workspace / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    with structlog.testing.capture_logs() as events:
        assert await plain(*python("print(1)")).score(left) == 0.0
    assert [event["event"] for event in events] == ["workspace_too_large"]
    assert "max_workspace_bytes" in events[0]["reason"]


async def test_attempts_are_made_on_fresh_copies_and_told(plain: Score, left: Left) -> None:
    code = """
import os, sys
assert not os.path.exists("dirt")
open("dirt", "w").close()
print("not yet")
"""
    with structlog.testing.capture_logs() as events, pytest.raises(EvaluationFailed) as failed:
        await plain(*python(code)).score(left)
    assert (failed.value.attempts, "not yet" in failed.value.reason) == (3, True)
    told = [event for event in events if event["event"] == "evaluation_failed"]
    assert [(event["execution"], event["attempt"]) for event in told] == [
        (left.execution, i) for i in (1, 2, 3)
    ]


async def test_a_later_attempt_may_succeed(plain: Score, left: Left) -> None:
    code = "import random; print(random.choice(['broken', '0.75']))"
    assert await plain(*python(code), attempts=40).score(left) == 0.75


FUNCTION = """
import beside
def share(workspace, task):
    print("1.0")
    return beside.HALF * float((workspace / "solution").read_text() == (task / "hidden").read_text())
def raises(workspace, task): return 1 / 0
def says_yes(workspace, task): return True
def much(workspace, task): return 7
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A file of functions."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "score.py").write_text(FUNCTION)
    (tmp_path / "own" / "beside.py").write_text("HALF = 0.5")
    return f"{tmp_path}/own/score.py"


async def test_a_function_scores(sandbox: Sandbox, left: Left, own: str) -> None:
    (left.workspace / "beside.py").write_text("HALF = 1.0")
    evaluator = Evaluator(EvaluatorConfig(function=f"{own}:share"), sandbox, Limits(file_bytes=1 << 20))
    assert await evaluator.score(left) == 0.5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "ZeroDivisionError"),
        ("says_yes", "returned True, which is no number"),
        ("much", r"not in \[0, 1\]: 7"),
        ("gone", "no attribute 'gone'"),
    ],
)
async def test_a_function_that_fails_is_no_score(left: Left, own: str, name: str, reason: str) -> None:
    config = EvaluatorConfig(function=f"{own}:{name}", attempts=1)
    with pytest.raises(EvaluationFailed, match=reason):
        await Evaluator(config, ProcessSandbox(), Limits(file_bytes=1 << 20)).score(left)


def mixed(**parts: PartConfig) -> Evaluator:
    return Evaluator(EvaluatorConfig(mix=parts), ProcessSandbox(), Limits(file_bytes=1 << 20))


async def test_a_mix_is_a_weighted_mean(left: Left) -> None:
    evaluator = mixed(
        all=PartConfig(command=("echo", "1"), weight=3.0), none=PartConfig(command=("echo", "0"), weight=1.0)
    )
    with structlog.testing.capture_logs() as events:
        assert await evaluator.score(left) == 0.75
    assert [(event["part"], event["score"]) for event in events] == [("all", 1.0), ("none", 0.0)]


async def test_a_mix_one_part_of_which_fails_is_no_score(left: Left) -> None:
    parts = {"good": PartConfig(command=("echo", "1")), "bad": PartConfig(command=("false",), attempts=2)}
    with pytest.raises(EvaluationFailed, match="failed 2 times: bad: it printed nothing"):
        await mixed(**parts).score(left)


PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={report}", "{workspace}")


async def test_junit_of_pytest_itself(evaluator: Score, left: Left) -> None:
    (left.workspace / "test_it.py").write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): assert False\n"
        "def test_c(): pass\n"
        "@pytest.mark.skip\n"
        "def test_d(): pass\n"
    )
    assert await evaluator(*PYTEST, junit=True, timeout_s=30.0).score(left) == pytest.approx(2 / 3)


async def test_junit_of_a_workspace_that_cannot_be_imported_is_a_zero(plain: Score, left: Left) -> None:
    (left.workspace / "test_it.py").write_text("import no_such_module\n")
    assert await plain(*PYTEST, junit=True, timeout_s=30.0).score(left) == 0.0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print(1)", "wrote no report"),
        ("import os, sys; os.symlink('/etc/hostname', sys.argv[3])", "wrote no report"),
        ("import sys; open(sys.argv[3], 'w').write('<testsuite/>')", "has no test"),
        ("import sys; open(sys.argv[3], 'w').write('<!DOCTYPE x><testsuite/>')", "document type"),
    ],
)
async def test_a_missing_or_broken_report_is_no_score(
    evaluator: Score, left: Left, code: str, reason: str
) -> None:
    with pytest.raises(EvaluationFailed, match=reason):
        await evaluator(*python(code), attempts=1, junit=True).score(left)


async def test_what_the_evaluator_says_is_logged(plain: Score, left: Left) -> None:
    await plain(*python("import sys; sys.stderr.write('a warning'); print(1)")).score(left)
    assert "a warning" in (left.folder / "evaluator.log").read_text()


async def test_nothing_of_the_job_is_in_its_environment(
    plain: Score, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_TEST_SECRET", "1")
    code = "import os; print(float('GYRE_TEST_SECRET' not in os.environ))"
    assert await plain(*python(code)).score(left) == 1.0
