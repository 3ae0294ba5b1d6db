"""Scores the workspace that an execution left, on a copy of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from gyre.harness.command_scorer import CommandScorer, function_scorer
from gyre.harness.config import EvaluatorConfig, ScorerConfig
from gyre.harness.judge import Judge
from gyre.harness.left import Evaluation, Left
from gyre.harness.own_scorer import OwnScorer
from gyre.harness.pytest_scorer import PytestScorer
from gyre.harness.room import with_room
from gyre.harness.sandbox import Limits, Sandbox
from gyre.harness.score import ScoreError
from gyre.harness.workspace import WorkspaceTooLarge, copy_tree, remove_tree

MAX_WAIT_S = 30.0

log = structlog.get_logger()


class EvaluationFailed(Exception):
    """No score could be had, which is not a score of 0. `reason` is that of the last attempt."""

    def __init__(self, reason: str, attempts: int) -> None:
        super().__init__(f"evaluation failed {attempts} times: {reason}")
        self.reason = reason
        self.attempts = attempts


class Scorer(Protocol):
    """One way to score. Raises ScoreError, OSError: it is tried again on a fresh copy."""

    def check(self, task: Path) -> None:
        """Blocking. Raises TasksError where it can never score what is left of this task."""

    async def score(self, evaluation: Evaluation) -> float:
        """In [0, 1]."""


class Evaluator:
    """Each attempt of each part is made on a fresh copy."""

    def __init__(self, config: EvaluatorConfig, sandbox: Sandbox, limits: Limits) -> None:
        self._max_bytes = limits.file_bytes
        self._parts = [
            _Part(name, part.weight, part.attempts, _scorer(part, sandbox, limits))
            for name, part in config.mix.items()
        ] or [_Part("", 1.0, config.attempts, _scorer(config, sandbox, limits))]

    def check(self, tasks: Iterable[Path]) -> None:
        """Blocking. Raises TasksError for the first of these folders that cannot be evaluated."""
        for task in tasks:
            for part in self._parts:
                part.scorer.check(task)

    async def score(self, left: Left) -> float:
        """In [0, 1]. A workspace beyond its bounds is worth nothing. Raises EvaluationFailed."""
        total = 0.0
        for part in self._parts:
            try:
                score = await self._part(part, left)
            except WorkspaceTooLarge as error:
                log.warning("workspace_too_large", execution=left.execution, reason=str(error))
                return 0.0
            if part.name:
                log.info("part_scored", execution=left.execution, part=part.name, score=score)
            total += part.weight * score
        return min(1.0, total / sum(part.weight for part in self._parts))

    async def _part(self, part: _Part, left: Left) -> float:
        reason, wait_s = "", 0.0
        for attempt in range(1, part.attempts + 1):
            # What is too busy to answer tells nobody when it is not any more.
            await asyncio.sleep(min(MAX_WAIT_S, wait_s * 2 ** min(attempt - 2, 10)))
            try:
                return await self._attempt(part.scorer, left)
            except (ScoreError, OSError) as error:
                reason = f"{part.name}: {error}" if part.name else str(error)
                wait_s = error.wait_s if isinstance(error, ScoreError) else 0.0
            log.warning("evaluation_failed", execution=left.execution, attempt=attempt, reason=reason)
        raise EvaluationFailed(reason, part.attempts)

    async def _attempt(self, scorer: Scorer, left: Left) -> float:
        evaluation = Evaluation(left=left, folder=left.folder / "evaluation")
        try:
            await with_room(partial(self._prepare, left, evaluation.folder), left.execution)
            return await scorer.score(evaluation)
        finally:
            await asyncio.to_thread(remove_tree, evaluation.folder)

    def _prepare(self, left: Left, folder: Path) -> None:
        remove_tree(folder)
        try:
            copy_tree(left.workspace, folder / "workspace", self._max_bytes)
            for name in ("home", "tmp"):
                (folder / name).mkdir()
        except BaseException:
            remove_tree(folder)
            raise


class _Part:
    def __init__(self, name: str, weight: float, attempts: int, scorer: Scorer) -> None:
        self.name = name
        self.weight = weight
        self.attempts = attempts
        self.scorer = scorer


def _scorer(config: ScorerConfig, sandbox: Sandbox, limits: Limits) -> Scorer:
    if config.pytest is not None:
        return PytestScorer(config.pytest, sandbox, limits, config.timeout_s)
    if config.judge is not None:
        return Judge(config.judge, config.timeout_s)
    if config.own:
        return OwnScorer(sandbox, limits, config.timeout_s)
    if config.function is not None:
        return function_scorer(config.function, sandbox, limits, config.timeout_s)
    return CommandScorer(config.command, sandbox, limits, config.timeout_s, junit=config.junit)
