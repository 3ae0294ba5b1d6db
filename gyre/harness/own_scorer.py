"""A score by the evaluator that a task brings: hidden tests, or a script of another format's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
from pathlib import Path

import msgspec

from gyre.harness.command_scorer import REPORT, explained, read_report
from gyre.harness.config import PytestConfig
from gyre.harness.formats import load_task
from gyre.harness.left import Evaluation
from gyre.harness.output import Output
from gyre.harness.pytest_scorer import MAX_TESTS_BYTES, PytestScorer, hidden_functions
from gyre.harness.sandbox import Limits, Mount, Sandbox, run
from gyre.harness.score import ScoreError, junit_score
from gyre.harness.task import Script, Suite, Task, TasksError
from gyre.harness.workspace import copy_tree, remove_tree

SITE = Path(__file__).with_name("script_site.py")
MAX_REWARD_BYTES = 1 << 20


class OwnScorer:
    """Each task has its own."""

    def __init__(self, sandbox: Sandbox, limits: Limits, timeout_s: float) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._timeout_s = timeout_s

    def check(self, task: Path) -> None:
        found = load_task(task)
        match found.own:
            case None:
                raise TasksError(
                    str(task), "has no evaluator of its own", "put hidden tests into its folder tests"
                )
            case Suite(tests=tests):
                hidden_functions(task / tests)
            case Script():
                inside = Mount(host=task, inside="/tests")
                if self._sandbox.path(inside) != inside.inside:
                    problem = "has a script for tests that lie at /tests"
                    raise TasksError(str(task), problem, "set evaluator.sandbox to 'bubblewrap'")

    async def score(self, evaluation: Evaluation) -> float:
        try:
            task = await asyncio.to_thread(load_task, evaluation.left.task)
        except TasksError as error:
            raise ScoreError(str(error)) from error
        evaluation = msgspec.structs.replace(evaluation, inside=task.inside)
        if isinstance(task.own, Script):
            return await self._script(evaluation, task, task.own)
        if task.own is None:
            raise ScoreError(f"{task.folder} has no evaluator of its own")
        await asyncio.to_thread(_overlay, task, task.own, evaluation.workspace.host)
        tests = PytestScorer(
            PytestConfig(tests=Path(task.own.tests)), self._sandbox, self._limits, self._timeout_s
        )
        return await tests.score(evaluation)

    async def _script(self, evaluation: Evaluation, task: Task, own: Script) -> float:
        tests = Mount(host=evaluation.folder / "tests", inside="/tests")
        logs = Mount(host=evaluation.folder / "logs", inside="/logs", writable=True)
        verdict = logs.host / "verifier"
        site = Mount(host=evaluation.folder / "site", inside="/gyre/site")
        await asyncio.to_thread(_stage, own, tests.host, verdict, site.host)
        confined = evaluation.confined(own.command, (tests, logs, site), self._sandbox, self._limits)
        environment = {**confined.environment, **task.environment, **own.environment}
        paths = (self._sandbox.path(site), environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if own.junit:
            environment["PYTEST_ADDOPTS"] = f"-p no:cacheprovider --junitxml=/logs/verifier/{REPORT}"
        confined = msgspec.structs.replace(confined, environment=environment)
        output = Output(evaluation.log)
        timeout_s = own.timeout_s or self._timeout_s
        ended = await run(self._sandbox, confined, output, timeout_s=timeout_s)
        if ended.kind == "timed_out":
            raise ScoreError(f"it did not end within {timeout_s:g} s")
        if ended.kind != "exited":
            raise ScoreError(f"it was killed by signal {ended.signal}" if ended.signal else ended.detail)
        try:
            if own.junit:
                return junit_score(await asyncio.to_thread(read_report, verdict / REPORT))
            return await asyncio.to_thread(_reward, verdict)
        except ScoreError as error:
            raise ScoreError(explained(str(error), ended, output.tail())) from error


def reward_of(text: str) -> float:
    """A number in [0, 1], or of several rewards by name the one named `reward`, or else their mean. Raises
    ScoreError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScoreError(f"its reward is no number: {text[:100]!r}") from error
    if isinstance(found, dict):
        values = [found["reward"]] if "reward" in found else list(found.values())
    else:
        values = [found]
    if not values or not all(type(value) in (int, float) for value in values):
        raise ScoreError(f"its reward is no number: {text[:100]!r}")
    with contextlib.suppress(OverflowError):
        reward = math.fsum(values) / len(values)
        if 0.0 <= reward <= 1.0:
            return reward
    raise ScoreError(f"its reward is not in [0, 1]: {text[:100]!r}")


def _reward(folder: Path) -> float:
    for name in ("reward.json", "reward.txt"):
        path = folder / name
        # Not through a link, which would lead out of the sandbox.
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_REWARD_BYTES:
            return reward_of(path.read_bytes().decode(errors="replace").strip())
    raise ScoreError("it wrote no /logs/verifier/reward.txt or reward.json")


def _stage(own: Script, tests: Path, verdict: Path, site: Path) -> None:
    copy_tree(own.tests, tests, MAX_TESTS_BYTES)
    for path in own.beside:
        shutil.copy2(path, tests / path.name)
    verdict.mkdir(parents=True)
    site.mkdir()
    shutil.copy2(SITE, site / "sitecustomize.py")


def _overlay(task: Task, own: Suite, workspace: Path) -> None:
    """In place of what is there, which may be anything."""
    for name in own.overlay:
        source, target = task.folder / own.tests / name, workspace / name
        for parent in reversed(target.relative_to(workspace).parents):
            place = workspace / parent
            if place.is_symlink() or not place.is_dir():
                place.unlink(missing_ok=True)
                place.mkdir()
        if target.is_dir() and not target.is_symlink():
            remove_tree(target)
        else:
            target.unlink(missing_ok=True)
        if source.is_dir():
            copy_tree(source, target, MAX_TESTS_BYTES)
        else:
            shutil.copy2(source, target)
