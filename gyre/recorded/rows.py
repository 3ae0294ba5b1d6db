"""What is exported: one row for each execution, for each trajectory, or for each run of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np

from gyre.recorded.run import Fate, Recorded, RecordedRun
from gyre.recorded.text import TokenText
from gyre.trajectory.reader import DamagedRow
from gyre.trajectory.tree import Node

By = Literal["execution", "trajectory", "span"]
Mask = Literal["context", "trained", "excluded", "undecided"]


class ExecutionLine(msgspec.Struct, frozen=True, kw_only=True):
    """An execution in figures. `reason` is how it ended, None where it has not."""

    run: str
    execution: str
    group: str
    task: str
    split: str
    index: int
    attempt: int
    step: int
    version_dispatched: int
    reason: str | None
    score: float | None
    advantage: float | None
    seconds: float | None
    calls: int
    turns: int
    sampled_tokens: int
    trained_tokens: int | None
    excluded_tokens: dict[str, int]
    roles: dict[str, int]
    compactions: int
    sub_agents: int
    retries: int
    exit_code: int | None
    detail: str


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Of an execution."""

    run: str
    execution: str
    group: str
    task: str
    split: str
    step: int
    score: float | None
    advantage: float | None


class TrajectoryLine(_Part, frozen=True, kw_only=True):
    """A path from a root to the call `leaf`. Lists have one entry for each token of the path."""

    leaf: int
    call: str
    role: str
    draw: int | None
    weight: float | None
    tokens: int
    sampled_tokens: int
    trained_tokens: int
    token_ids: list[int]
    sampled: list[bool]
    trained: list[bool]
    logprobs: list[float]
    versions: list[int]
    kv_versions: list[int]


class SpanLine(_Part, frozen=True, kw_only=True):
    """Tokens of one call that follow each other and have all but id and log-probability in common.
    `position` is that of the first on its path."""

    node: int
    call: str
    parent: int | None
    role: str
    position: int
    tokens: int
    mask: Mask
    reason: str | None
    draw: int | None
    version: int | None
    kv_version: int | None
    token_ids: list[int]
    logprobs: list[float]
    text: str | None


Line = ExecutionLine | TrajectoryLine | SpanLine
LINES: dict[By, type[Line]] = {"execution": ExecutionLine, "trajectory": TrajectoryLine, "span": SpanLine}


def lines(
    run: RecordedRun,
    by: By,
    text: TokenText | None,
    damaged: Callable[[DamagedRow], None],
    group: str | None = None,
) -> Iterator[Line]:
    """Of all executions or those of a group; `damaged` is told of what cannot be read."""
    for found in run.each(group):
        if isinstance(found, DamagedRow):
            damaged(found)
        elif by == "execution":
            yield execution_line(run, found)
        elif by == "trajectory":
            yield from trajectory_lines(run, found)
        else:
            yield from span_lines(run, found, text)


def execution_line(run: RecordedRun, found: Recorded) -> ExecutionLine:
    spec, ended, counts = found.row.spec, found.row.ended, found.counts
    result = ended.result if ended else None
    return ExecutionLine(
        run=run.folder.name,
        execution=spec.execution,
        group=spec.group,
        task=spec.task,
        split=spec.split,
        index=spec.index,
        attempt=spec.attempt,
        step=_step(found),
        version_dispatched=spec.version_dispatched,
        reason=result.reason if result else None,
        score=result.score if result else None,
        advantage=found.advantage,
        seconds=result.seconds if result else None,
        calls=counts.calls,
        turns=counts.turns,
        sampled_tokens=counts.sampled_tokens,
        trained_tokens=found.trained_tokens,
        excluded_tokens=found.excluded_tokens,
        roles=counts.roles,
        compactions=counts.compactions,
        sub_agents=counts.sub_agents,
        retries=counts.retries,
        exit_code=result.exit_code if result else None,
        detail=result.detail if result else "",
    )


def _of_execution(run: RecordedRun, found: Recorded) -> dict[str, Any]:
    """The fields of `_Part`."""
    spec = found.row.spec
    return {
        "run": run.folder.name,
        "execution": spec.execution,
        "group": spec.group,
        "task": spec.task,
        "split": spec.split,
        "step": _step(found),
        "score": _score(found),
        "advantage": found.advantage,
    }


def trajectory_lines(run: RecordedRun, found: Recorded) -> Iterator[TrajectoryLine]:
    """Those that are trained in the order of their draws, then the others."""
    drawn = {trajectory.leaf: index for index, trajectory in enumerate(found.draws)}
    for leaf in sorted(found.tree.leaves(), key=lambda node: (drawn.get(node.index, len(drawn)), node.index)):
        tokens = found.tree.path_tokens(leaf)
        draw = drawn.get(leaf.index)
        its = found.draws[draw] if draw is not None else None
        trained = np.frombuffer(its.trainable, np.uint8) if its else np.zeros(len(tokens.token_ids), np.uint8)
        yield TrajectoryLine(
            **_of_execution(run, found),
            leaf=leaf.index,
            call=leaf.call,
            role=found.roles.of_node[leaf.index],
            draw=draw,
            weight=its.weight if its else None,
            tokens=len(tokens.token_ids),
            sampled_tokens=int(tokens.sampled.sum()),
            trained_tokens=int(trained.sum()),
            token_ids=tokens.token_ids.tolist(),
            sampled=tokens.sampled.tolist(),
            trained=trained.astype(bool).tolist(),
            logprobs=tokens.logprobs.tolist(),
            versions=tokens.versions.tolist(),
            kv_versions=tokens.kv_versions.tolist(),
        )


def span_lines(run: RecordedRun, found: Recorded, text: TokenText | None) -> Iterator[SpanLine]:
    """In the order the calls were recorded."""
    fates = found.fates()
    ends: list[int] = []  # of each node's path, in tokens
    for node in found.tree.nodes:
        begins = 0 if node.parent is None else ends[node.parent]
        ends.append(begins + len(node.tokens.token_ids))
        for first, last in _spans(node):
            yield _span(run, found, node, first, last, begins, fates.get(node.call, Fate()), text)


def mask(sampled: bool, fate: Fate) -> Mask:
    if not sampled:
        return "context"
    if fate.draw is not None:
        return "trained"
    return "excluded" if fate.reason is not None else "undecided"


def _span(
    run: RecordedRun,
    found: Recorded,
    node: Node,
    first: int,
    last: int,
    begins: int,
    fate: Fate,
    text: TokenText | None,
) -> SpanLine:
    tokens = node.tokens
    sampled = bool(tokens.sampled[first])
    ids = tokens.token_ids[first:last].tolist()
    return SpanLine(
        **_of_execution(run, found),
        node=node.index,
        call=node.call,
        parent=node.parent,
        role=found.roles.of_node[node.index],
        position=begins + first,
        tokens=last - first,
        mask=mask(sampled, fate),
        reason=fate.reason if sampled else None,
        draw=fate.draw if sampled else None,
        version=int(tokens.versions[first]) if sampled else None,
        kv_version=int(tokens.kv_versions[first]) if sampled else None,
        token_ids=ids,
        logprobs=tokens.logprobs[first:last].tolist() if sampled else [],
        text=text.joined(ids) if text else None,
    )


def _spans(node: Node) -> Iterator[tuple[int, int]]:
    """Where what is the same for a run of tokens changes."""
    tokens = node.tokens
    if not len(tokens.token_ids):
        return
    same = np.stack([tokens.sampled.astype(np.int32), tokens.versions, tokens.kv_versions])
    changes = np.flatnonzero((same[:, 1:] != same[:, :-1]).any(axis=0)) + 1
    bounds = [0, *changes.tolist(), len(tokens.token_ids)]
    yield from pairwise(bounds)


def _step(found: Recorded) -> int:
    return found.outcome.step if found.outcome else found.row.spec.step


def _score(found: Recorded) -> float | None:
    return found.row.ended.result.score if found.row.ended else None
