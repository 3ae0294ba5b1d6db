"""A score by a command: what it prints, or its JUnit XML; and by a function, which is run by one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gyre.harness import function_runner
from gyre.harness.commands import fill, named_files
from gyre.harness.left import Evaluation
from gyre.harness.output import Output
from gyre.harness.process import Exit
from gyre.harness.sandbox import Limits, Mount, Sandbox, run
from gyre.harness.score import ScoreError, junit_score, last_line_score

MAX_REPORT_BYTES = 32 << 20
REPORT = "report.xml"


class CommandScorer:
    """Runs a command beside the task's folder. `visible` is what it can see besides."""

    def __init__(
        self,
        command: tuple[str, ...],
        sandbox: Sandbox,
        limits: Limits,
        timeout_s: float,
        *,
        junit: bool = False,
        visible: tuple[Mount, ...] = (),
    ) -> None:
        self._command = command
        self._sandbox = sandbox
        self._limits = limits
        self._timeout_s = timeout_s
        self._junit = junit
        self._visible = (*visible, *named_files(command))

    def check(self, task: Path) -> None:
        pass

    async def score(self, evaluation: Evaluation) -> float:
        path = self._sandbox.path
        report = Mount(host=evaluation.folder / "report", inside="/report", writable=True)
        report.host.mkdir()
        task = Mount(host=evaluation.left.task, inside="/task")
        places = {
            "workspace": path(evaluation.workspace),
            "task": path(task),
            "report": f"{path(report)}/{REPORT}",
        }
        output, errors = Output(), Output(evaluation.log)
        confined = evaluation.confined(
            fill(self._command, places), (report, task, *self._visible), self._sandbox, self._limits
        )
        ended = await run(self._sandbox, confined, output, errors, timeout_s=self._timeout_s)
        if ended.kind == "timed_out":
            raise ScoreError(f"it did not end within {self._timeout_s:g} s")
        if ended.kind != "exited":
            raise ScoreError(f"it was killed by signal {ended.signal}" if ended.signal else ended.detail)
        try:
            if self._junit:
                return junit_score(await asyncio.to_thread(read_report, report.host / REPORT))
            return last_line_score(output.tail())
        except ScoreError as error:
            raise ScoreError(explained(str(error), ended, errors.tail())) from error


def function_scorer(function: str, sandbox: Sandbox, limits: Limits, timeout_s: float) -> CommandScorer:
    """`function` is `file.py:function` (what lies beside the file can be imported) or
    `package.module:function`."""
    place = function.rpartition(":")[0]
    runner = function_runner.__file__
    visible = [Mount(host=Path(runner), inside=runner)]
    if place.endswith(".py"):
        beside = Path(place).parent
        visible.append(Mount(host=beside, inside=str(beside)))
    command = ("{python}", runner, function, "{workspace}", "{task}")
    return CommandScorer(command, sandbox, limits, timeout_s, visible=tuple(visible))


def read_report(path: Path) -> bytes:
    """Not through a link, which would lead out of the sandbox. Raises ScoreError."""
    try:
        if path.is_symlink() or not path.is_file():
            raise ScoreError(f"it wrote no report to {{report}} ({path.name})")
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise ScoreError(f"its report has more than {MAX_REPORT_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ScoreError(f"its report cannot be read: {error}") from error


def explained(problem: str, ended: Exit, errors: str) -> str:
    last = errors.strip().splitlines()[-1:]
    how = [f"exit code {ended.code}", *([ended.detail] if ended.detail else [])]
    return "; ".join([problem, *how, *(f"it said {line[:300]!r}" for line in last)])
