"""Scores of a run had again from the workspaces that it kept, by its evaluator or by another."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec

from gyre.harness.actor import source_folder
from gyre.harness.evaluator import EvaluationFailed, Evaluator
from gyre.harness.left import Left
from gyre.harness.process import start_guardian
from gyre.harness.sandbox import limits_of
from gyre.harness.sandboxes import sandboxes_by_name
from gyre.job import Job
from gyre.recorded.run import RecordedRun
from gyre.trajectory.reader import DamagedRow, ExecutionRow

Lack = Literal["workspace", "task"]


class Rescored(msgspec.Struct, frozen=True, kw_only=True):
    """`score` is None where the evaluation failed, for the reason in `detail`; `was` where the execution had
    been dropped."""

    execution: str
    group: str
    task: str
    was: float | None
    score: float | None
    detail: str = ""


async def rescore(
    run: RecordedRun,
    job: Job,
    concurrent: int,
    group: str | None,
    lacking: Counter[Lack],
    tell: Callable[[Rescored], None],
) -> None:
    """Tells of the executions that have ended, in order; so many are scored at a time, each on a copy of its
    workspace as in the job. Where the workspace or the task's folder is not there any more this is counted in
    `lacking`. Raises SandboxMissing, TasksError, and what `tell` raises; then nothing of it runs any more."""
    with TemporaryDirectory(prefix="gyre-rescore-") as name:
        async with _guarded() as guard:
            place = Path(name)
            sandbox = sandboxes_by_name(place / "sandbox")[job.evaluator.sandbox]
            await asyncio.to_thread(sandbox.check)
            evaluator = Evaluator(job.evaluator, sandbox, limits_of(job.harness))
            found = enumerate(_left(run, job, group, place, guard, lacking))
            in_order = _InOrder(tell)

            async def work() -> None:
                for number, (row, left) in found:
                    in_order.take(number, await _score(evaluator, row, left))

            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(concurrent):
                        workers.create_task(work())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None


class _InOrder:
    """Tells of each when all before it are told of."""

    def __init__(self, tell: Callable[[Rescored], None]) -> None:
        self._tell = tell
        self._next = 0
        self._early: dict[int, Rescored] = {}

    def take(self, number: int, rescored: Rescored) -> None:
        self._early[number] = rescored
        while self._next in self._early:
            self._tell(self._early.pop(self._next))
            self._next += 1


async def _score(evaluator: Evaluator, row: ExecutionRow, left: Left) -> Rescored:
    score, detail = None, ""
    await asyncio.to_thread(evaluator.check, [left.task])
    await asyncio.to_thread(left.folder.mkdir)
    try:
        score = await evaluator.score(left)
    except EvaluationFailed as error:
        detail = str(error)
    return Rescored(
        execution=row.execution,
        group=row.spec.group,
        task=row.spec.task,
        was=row.ended.result.score if row.ended else None,
        score=score,
        detail=detail,
    )


def _left(
    run: RecordedRun, job: Job, group: str | None, place: Path, guard: str, lacking: Counter[Lack]
) -> Iterator[tuple[ExecutionRow, Left]]:
    for row in _ended(run.reader.scan(group)):
        workspace = run.folder / "executions" / row.execution / "workspace"
        source = job.eval if row.spec.split == "eval" else job.tasks
        task = source_folder(source, run.folder / "tasks" / row.spec.split) / row.spec.task
        if not workspace.is_dir():
            lacking["workspace"] += 1
        elif not task.is_dir():
            lacking["task"] += 1
        else:
            yield (
                row,
                Left(
                    execution=row.execution,
                    workspace=workspace,
                    task=task,
                    folder=place / row.execution,
                    mark=f"{guard}{row.execution}/",
                ),
            )


def _ended(rows: Iterable[ExecutionRow | DamagedRow]) -> Iterator[ExecutionRow]:
    """A placeholder never had anything to evaluate."""
    for row in rows:
        if isinstance(row, ExecutionRow) and row.ended and row.ended.result.reason != "never_started":
            yield row


@asynccontextmanager
async def _guarded() -> AsyncIterator[str]:
    """How the marks of all processes begin: they end with this process, however it ends."""
    guard = f"{secrets.token_hex(8)}/"
    guardian = start_guardian(guard)
    try:
        yield guard
    finally:
        await asyncio.to_thread(guardian.communicate)
