"""A score by hidden tests: nothing of the harness has seen them, they are run on a copy of what it left."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from random import SystemRandom

from gyre.harness.canaries import sow
from gyre.harness.commands import fill
from gyre.harness.config import PytestConfig
from gyre.harness.left import Evaluation
from gyre.harness.outcomes import Outcomes, functions_in, is_test_file
from gyre.harness.output import Output
from gyre.harness.sandbox import Limits, Mount, Sandbox, run
from gyre.harness.score import ScoreError
from gyre.harness.tasks import TasksError
from gyre.harness.workspace import copy_tree

RUNNER = Path(__file__).with_name("pytest_runner.py")
ORDERS = "orders.json"
KEY = "evaluator.pytest.tests"
MAX_TESTS_BYTES = 1 << 30
# Of a process' lines. Where there are more the first are lost, and their tests did not pass.
MAX_OUTPUT_BYTES = 32 << 20


class PytestScorer:
    """A process of pytest, and one more for what is left of the tests whenever one of them ended it."""

    def __init__(self, config: PytestConfig, sandbox: Sandbox, limits: Limits, timeout_s: float) -> None:
        self._config = config
        self._sandbox = sandbox
        self._limits = limits
        self._timeout_s = timeout_s

    def check(self, task: Path) -> None:
        hidden_functions(task / self._config.tests)

    async def score(self, evaluation: Evaluation) -> float:
        hidden = Mount(host=evaluation.folder / "tests", inside="/tests")
        orders = Mount(host=evaluation.folder / "orders", inside="/orders", writable=True)
        first, last = canaries = (_name(), _name())
        expected, sown = await asyncio.to_thread(self._prepare, evaluation, hidden, orders)
        outcomes = Outcomes(expected, first, last, sown)
        until = time.monotonic() + self._timeout_s
        known = -1
        while not outcomes.is_over and known < len(outcomes.begun) + len(outcomes.lost):
            known = len(outcomes.begun) + len(outcomes.lost)
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            await self._run(evaluation, hidden, orders, outcomes, canaries, left_s)
        return outcomes.score()

    def _prepare(
        self, evaluation: Evaluation, hidden: Mount, orders: Mount
    ) -> tuple[list[str], tuple[str, ...]]:
        """The tests that there are, and those that must fail. Theirs is a copy too: without walls they could
        be written to."""
        source = evaluation.left.task / self._config.tests
        expected = hidden_functions(source)
        copy_tree(source, hidden.host, MAX_TESTS_BYTES)
        orders.host.mkdir()
        changed, sown = sow(dict(_sources(source)), SystemRandom())
        for name, text in changed.items():
            path = hidden.host / name
            path.unlink(missing_ok=True)  # it may be read-only, or a link to another
            path.write_bytes(text)
        return expected, sown

    async def _run(
        self,
        evaluation: Evaluation,
        hidden: Mount,
        orders: Mount,
        outcomes: Outcomes,
        canaries: tuple[str, str],
        timeout_s: float,
    ) -> None:
        secret, canary = secrets.token_hex(16), f"{_name()}.py"
        path = self._sandbox.path
        workspace = path(evaluation.workspace)
        words = {
            "secret": secret,
            "canaries": canaries,
            "canary": f"{path(orders)}/{canary}",
            "tests": path(hidden),
            "path": [workspace, f"{workspace}/src"],
            "plugins": self._config.plugins,
            "test_timeout_s": self._config.test_timeout_s,
            "done": outcomes.begun,
            "lost": outcomes.lost,
        }
        await asyncio.to_thread(_write_orders, orders.host, canary, canaries, words)
        output, errors = Output(tail_bytes=MAX_OUTPUT_BYTES), Output(evaluation.log)
        runner = Mount(host=RUNNER, inside=str(RUNNER))
        command = fill(("{python}", "-I", path(runner), f"{path(orders)}/{ORDERS}"), {})
        confined = evaluation.confined(command, (hidden, orders, runner), self._sandbox, self._limits)
        ended = await run(self._sandbox, confined, output, errors, timeout_s=timeout_s)
        outcomes.read(output.tail(), secret)
        if not outcomes.was_ready:
            said = ended.detail or errors.tail().strip()[-300:]
            raise ScoreError(f"pytest did not start ({ended.kind}, exit code {ended.code}): {said}")


def hidden_functions(tests: Path) -> list[str]:
    """The tests in a folder, by file, class and function. Blocking. Raises TasksError."""
    fix = f"write tests there, or name their folder in {KEY}"
    if not os.path.isdir(tests):
        raise TasksError(str(tests), "there is no such folder of hidden tests", fix)
    found: list[str] = []
    for name, source in _sources(tests):
        try:
            found += functions_in(name, source)
        except (SyntaxError, ValueError) as error:
            raise _unreadable(tests / name, error) from error
    if not found:
        raise TasksError(str(tests), "has no test in it", f"{fix}; files test_*.py with functions test_*")
    return found


def _sources(tests: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(tests.rglob("*.py")):
        name = path.relative_to(tests).as_posix()
        if is_test_file(PurePosixPath(name)):
            try:
                yield name, path.read_bytes()
            except OSError as error:
                raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> TasksError:
    return TasksError(str(path), f"cannot be read ({error})", "make it a Python file")


def _name() -> str:
    return f"test_{secrets.token_hex(6)}"


def _write_orders(folder: Path, canary: str, canaries: tuple[str, str], words: dict[str, object]) -> None:
    first, last = canaries
    (folder / canary).write_text(f"def {first}():\n    assert 1 == 2\n\n\ndef {last}():\n    assert 1 == 2\n")
    (folder / ORDERS).write_text(json.dumps(words), encoding="utf-8")
