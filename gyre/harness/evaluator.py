"""Scores the workspace that an execution left, on a copy of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
import structlog

from gyre.harness.commands import base_environment, fill, named_files
from gyre.harness.config import EvaluatorConfig
from gyre.harness.output import Output
from gyre.harness.room import with_room
from gyre.harness.sandbox import Confined, Mount, Sandbox, run
from gyre.harness.score import ScoreError, junit_score, last_line_score
from gyre.harness.workspace import WorkspaceTooLarge, copy_tree, remove_tree

MAX_REPORT_BYTES = 32 << 20
REPORT = "report.xml"

log = structlog.get_logger()


class EvaluationFailed(Exception):
    """No score could be had, which is not a score of 0. `reason` is that of the last attempt."""

    def __init__(self, reason: str, attempts: int) -> None:
        super().__init__(f"evaluation failed {attempts} times: {reason}")
        self.reason = reason
        self.attempts = attempts


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be evaluated: a workspace in which nothing runs any more, and the folder of its task.
    `folder` is where copies and logs may be made."""

    execution: str
    workspace: Path
    task: Path
    folder: Path
    mark: str


class Evaluator:
    """Runs the evaluator's command, each attempt on a fresh copy."""

    def __init__(self, config: EvaluatorConfig, sandbox: Sandbox, max_workspace_bytes: int) -> None:
        self._config = config
        self._sandbox = sandbox
        self._max_bytes = max_workspace_bytes

    async def score(self, left: Left) -> float:
        """In [0, 1]. Raises EvaluationFailed."""
        reason = ""
        for attempt in range(1, self._config.attempts + 1):
            try:
                return await self._attempt(left)
            except (ScoreError, WorkspaceTooLarge, OSError) as error:
                reason = str(error)
            log.warning("evaluation_failed", execution=left.execution, attempt=attempt, reason=reason)
        raise EvaluationFailed(reason, self._config.attempts)

    async def _attempt(self, left: Left) -> float:
        folder = left.folder / "evaluation"
        try:
            await with_room(partial(self._prepare, left, folder), left.execution)
            return await self._run(left, folder)
        finally:
            await asyncio.to_thread(remove_tree, folder)

    def _prepare(self, left: Left, folder: Path) -> None:
        remove_tree(folder)
        try:
            copy_tree(left.workspace, folder / "workspace", self._max_bytes)
            for name in ("report", "home", "tmp"):
                (folder / name).mkdir()
        except BaseException:
            remove_tree(folder)
            raise

    async def _run(self, left: Left, folder: Path) -> float:
        output = Output()
        errors = Output(left.folder / "evaluator.log")
        confined = self._confined(left, folder)
        ended = await run(self._sandbox, confined, output, errors, timeout_s=self._config.timeout_s)
        if ended.kind == "timed_out":
            raise ScoreError(f"it did not end within {self._config.timeout_s:g} s")
        if ended.kind != "exited":
            raise ScoreError(f"it was killed by signal {ended.signal}" if ended.signal else ended.detail)
        try:
            if self._config.junit:
                return junit_score(await asyncio.to_thread(_read_report, folder / "report" / REPORT))
            return last_line_score(output.tail())
        except ScoreError as error:
            raise ScoreError(_explained(str(error), ended.code, errors.tail())) from error

    def _confined(self, left: Left, folder: Path) -> Confined:
        workspace = Mount(host=folder / "workspace", inside="/workspace", writable=True)
        home = Mount(host=folder / "home", inside="/home/agent", writable=True)
        temporary = Mount(host=folder / "tmp", inside="/tmp", writable=True)
        report = Mount(host=folder / "report", inside="/report", writable=True)
        task = Mount(host=left.task, inside="/task")
        path = self._sandbox.path
        values: Mapping[str, str] = {
            "workspace": path(workspace),
            "task": path(task),
            "report": f"{path(report)}/{REPORT}",
        }
        command = fill(self._config.command, values)
        return Confined(
            command=command,
            environment=base_environment(path(home), path(temporary)),
            workspace=workspace,
            mounts=(home, temporary, report, task, *named_files(self._config.command)),
            socket=None,
            mark=left.mark,
            file_bytes=self._max_bytes,
        )


def _read_report(path: Path) -> bytes:
    """Not through a link, which would lead out of the sandbox. Raises ScoreError."""
    try:
        if path.is_symlink() or not path.is_file():
            raise ScoreError(f"it wrote no report to {{report}} ({path.name})")
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise ScoreError(f"its report has more than {MAX_REPORT_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ScoreError(f"its report cannot be read: {error}") from error


def _explained(problem: str, code: int | None, errors: str) -> str:
    last = errors.strip().splitlines()[-1:]
    return "; ".join([problem, f"exit code {code}", *(f"it said {line[:300]!r}" for line in last)])
