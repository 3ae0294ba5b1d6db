"""One execution: attempts at running the harness on a task, then the score of what it left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gyre.actors import Actor, ActorError, Ref, Tell, handles
from gyre.harness.config import HarnessConfig
from gyre.harness.evaluator import EvaluationFailed, Evaluator
from gyre.harness.left import Left
from gyre.harness.output import Output
from gyre.harness.players import Attempt, HarnessGone, Player
from gyre.harness.presets import compaction_limit
from gyre.harness.process import Exit
from gyre.harness.room import with_room
from gyre.harness.tasks import Task
from gyre.harness.workspace import WorkspaceTooLarge, lay, remove_tree
from gyre.proxy.messages import CloseExecution, OpenExecution
from gyre.schedule.messages import ExecutionFinished, ExecutionStarted
from gyre.trajectory.records import (
    EndReason,
    ExecutionEnded,
    ExecutionOpened,
    ExecutionResult,
    ExecutionSpec,
)

log = structlog.get_logger()

# The journal answers when it has written, and a full disk can make that long.
JOURNAL_S = 24 * 3600.0
RETRY_PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What all executions of a job share. `folder` has one folder an execution, `guard` begins the marks in
    the environments of all their processes."""

    config: HarnessConfig
    model: str
    player: Player
    evaluator: Evaluator
    folder: Path
    guard: str
    proxy: Ref
    trajectory: Ref
    waterlevel: Ref


class Begin(Tell, frozen=True, kw_only=True):
    """The HarnessActor to an ExecutionActor, once it watches it."""


class ExecutionActor(Actor):
    """Plays one execution and stops. State: the attempt at hand."""

    def __init__(self, spec: ExecutionSpec, task: Task, around: Surroundings) -> None:
        self._spec = spec
        self._task = task
        self._around = around
        self._folder = around.folder / spec.execution
        self._began_s = 0.0
        self._tries = 0

    def summary(self) -> Mapping[str, Any]:
        spec = self._spec
        since_s = time.monotonic() - self._began_s if self._began_s else 0.0
        return {"task": spec.task, "attempt": spec.attempt, "split": spec.split, "for_s": round(since_s, 1)}

    @handles(Begin)
    async def begin(self, _: Begin) -> None:
        self.context.run(self._play(), name="play")

    async def _play(self) -> None:
        around, execution = self._around, self._spec.execution
        self._began_s = time.monotonic()
        await around.waterlevel.tell(ExecutionStarted(execution=execution))
        try:
            result = await self._refilled()
        except HarnessGone as error:
            # The job ends too; when it is resumed, this execution is played anew.
            log.info("execution_left", execution=execution, reason=str(error))
            self.context.stop()
            return
        await asyncio.to_thread(self._tidy, result)
        await around.trajectory.ask(ExecutionEnded(spec=self._spec, result=result), timeout_s=JOURNAL_S)
        await around.waterlevel.tell(ExecutionFinished(execution=execution, split=self._spec.split))
        self.context.stop()

    async def _refilled(self) -> ExecutionResult:
        """A group that loses a member is worth less: what was dropped is played anew, as often as may be.
        With the same draws it would be dropped for the same reason."""
        refills = self._around.config.refills
        for refill in range(self._spec.refill + 1, refills + 1):
            result = await self._result()
            if result.score is not None:
                return result
            log.warning(
                "execution_refilled",
                execution=self._spec.execution,
                refill=refill,
                refills=refills,
                reason=result.detail,
            )
            self._spec = msgspec.structs.replace(self._spec, refill=refill)
        return await self._result()

    async def _result(self) -> ExecutionResult:
        limit_s = self._around.config.overall_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._score(await self._attempts())
        except TimeoutError:
            if not limit.expired():
                raise
        log.warning("execution_dropped", execution=self._spec.execution, reason="overall_timeout")
        return self._ended("overall_timeout", None, detail=f"not over within {limit_s:g} s")

    async def _attempts(self) -> Exit:
        """How the last attempt ended: the first that was neither killed by others nor without a start."""
        attempts = self._around.config.attempts
        for attempt in range(1, attempts + 1):
            ended = await self._attempt_with_its_machine()
            if ended.kind not in ("killed", "never_started"):
                break
            self._log_failed(ended, attempt)
            if ended.kind == "never_started" and attempt < attempts:
                await asyncio.sleep(RETRY_PAUSE_S * attempt)
        return ended

    async def _attempt_with_its_machine(self) -> Exit:
        """Those whose machine goes do not count: that is no doing of the policy's, and on machines that may
        be taken away happens often. The overall time-out holds."""
        while True:
            self._tries += 1
            self._spec = msgspec.structs.replace(self._spec, attempt=self._tries)
            await self._around.trajectory.ask(ExecutionOpened(spec=self._spec), timeout_s=JOURNAL_S)
            ended = await self._attempt()
            if ended.kind != "lost":
                return ended
            log.warning(
                "harness_lost", execution=self._spec.execution, attempt=self._tries, detail=ended.detail
            )

    async def _attempt(self) -> Exit:
        try:
            await with_room(self._prepare, self._spec.execution)
            output = Output(self._folder / "harness.log")
        except (OSError, WorkspaceTooLarge) as error:
            return Exit(kind="never_started", detail=f"its workspace cannot be made: {error}")
        execution, attempt = self._spec.execution, self._spec.attempt
        opening = OpenExecution(
            execution=execution,
            attempt=attempt,
            refill=self._spec.refill,
            compactions=compaction_limit(self._around.config),
        )
        access = await self._around.proxy.ask(opening)
        try:
            return await self._around.player.play(
                Attempt(
                    execution=execution,
                    number=attempt,
                    task=self._task,
                    folder=self._folder,
                    mark=self._mark(),
                    access=access,
                    model=self._around.model,
                    output=output,
                    on_start=self._log_started,
                )
            )
        finally:
            output.close()
            # While the job stops, the proxy may be gone before.
            with contextlib.suppress(ActorError):
                await self._around.proxy.ask(CloseExecution(execution=execution), timeout_s=JOURNAL_S)

    def _prepare(self) -> None:
        """A fresh workspace, whatever an earlier attempt or life of the job left."""
        self._clear()
        try:
            self._fill()
        except BaseException:
            self._clear()
            raise

    def _clear(self) -> None:
        for name in ("workspace", "home", "tmp"):
            remove_tree(self._folder / name)

    def _fill(self) -> None:
        lay(self._task.parts, self._folder / "workspace", self._around.config.max_workspace_bytes)
        for name in ("home", "tmp"):
            (self._folder / name).mkdir()
        (self._folder / "prompt.md").write_text(self._task.prompt, encoding="utf-8")

    async def _score(self, ended: Exit) -> ExecutionResult:
        if ended.kind == "never_started":
            return self._ended("never_started", 0.0, detail=ended.detail)
        reason: EndReason = "harness_timeout" if ended.kind == "timed_out" else "harness_error"
        if ended.code == 0:
            reason = "completed"
        detail = f"killed by signal {ended.signal}" if ended.signal is not None else ended.detail
        left = Left(
            execution=self._spec.execution,
            workspace=self._folder / "workspace",
            task=self._task.folder,
            folder=self._folder,
            mark=f"{self._mark()}evaluator/",
        )
        try:
            score = await self._around.evaluator.score(left)
        except EvaluationFailed as error:
            return self._ended(reason, None, exit_code=ended.code, detail=str(error))
        return self._ended(reason, score, exit_code=ended.code, detail=detail)

    def _ended(
        self, reason: EndReason, score: float | None, *, exit_code: int | None = None, detail: str = ""
    ) -> ExecutionResult:
        return ExecutionResult(
            execution=self._spec.execution,
            reason=reason,
            score=score,
            seconds=time.monotonic() - self._began_s,
            exit_code=exit_code,
            detail=detail,
        )

    def _tidy(self, result: ExecutionResult) -> None:
        """What was left stays where somebody may want to look at it."""
        if not (self._around.config.keep or result.score is None or result.reason == "never_started"):
            self._clear()

    def _mark(self) -> str:
        return f"{self._around.guard}{self._spec.execution}/{self._spec.attempt}/"

    def _log_started(self, pid: int | None) -> None:
        log.info(
            "harness_started",
            execution=self._spec.execution,
            attempt=self._spec.attempt,
            task=self._task.name,
            **({} if pid is None else {"pid": pid}),
        )

    def _log_failed(self, ended: Exit, attempt: int) -> None:
        log.warning(
            "harness_killed" if ended.kind == "killed" else "harness_never_started",
            execution=self._spec.execution,
            attempt=attempt,
            attempts=self._around.config.attempts,
            signal=ended.signal,
            detail=ended.detail,
        )
