"""From a complete group to micro-steps: a pure function of the group's content, whoever ended first."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from gyre.loss.microstep import MicroStep, Trajectory
from gyre.trajectory.advantage import advantages, shuffled
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.cuts import pack
from gyre.trajectory.ledger import Ledger, Reason, account, all_excluded, untrainable
from gyre.trajectory.roles import Roles
from gyre.trajectory.sampling import Draw, draw, generator, trainable
from gyre.trajectory.tree import Float32s, Int32s, TrajectoryTree

# A score relative to fewer tells nothing.
MIN_SCORED = 2


class ScoredExecution(msgspec.Struct, frozen=True, kw_only=True):
    """An execution of a group that was not dropped. A placeholder has an empty tree."""

    execution: str
    score: float
    tree: TrajectoryTree
    roles: Roles


class PlannedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """`executions` count in the step's mean, those without tokens too; a discarded group brings none. The
    `ledger` says of each sampled token of the scored executions where it went."""

    group: str
    step: int
    executions: int
    scores: dict[str, float]
    advantages: dict[str, float]
    micro_steps: tuple[MicroStep, ...]
    discarded: bool
    ledger: Ledger = Ledger()


def plan_group(
    group: str,
    step: int,
    executions: Iterable[ScoredExecution],
    sampling: SamplingConfig,
    micro_step_tokens: int,
    ranks: int = 1,
) -> PlannedGroup:
    """Advantages over all executions, sampling inside each, packing over all. A group without a signal
    (equal scores) has no micro-steps; one with fewer than two executions is discarded."""
    ordered = sorted(executions, key=lambda execution: execution.execution)
    scores = {execution.execution: execution.score for execution in ordered}
    discarded = len(ordered) < MIN_SCORED
    relative = {} if discarded else advantages(scores, sampling.advantage)
    if sampling.shuffle_advantages:
        relative = shuffled(relative, generator(sampling.seed, group))
    trajectories: list[Trajectory] = []
    ledger = Ledger()
    for execution in ordered:
        reason: Reason | None = "discarded_group" if discarded else None
        advantage = relative.get(execution.execution, 0.0)
        if reason is None and advantage == 0.0:
            reason = "zero_advantage"
        if reason is not None:
            ledger += all_excluded(execution.tree, reason)
            continue
        drawn, entries = sample(execution, advantage, sampling, step)
        trajectories += drawn
        ledger += entries
    return PlannedGroup(
        group=group,
        step=step,
        executions=0 if discarded else len(ordered),
        scores=scores,
        advantages=relative,
        micro_steps=_micro_steps(group, step, trajectories, micro_step_tokens, ranks),
        discarded=discarded,
        ledger=ledger,
    )


def sample(
    execution: ScoredExecution, advantage: float, sampling: SamplingConfig, version: int
) -> tuple[list[Trajectory], Ledger]:
    """The trajectories of an execution that are trained under weights of `version`, with weights that sum to
    1, and where its tokens went."""
    tree = execution.tree
    oldest = None if sampling.max_staleness is None else version - sampling.max_staleness
    barred = untrainable(tree, execution.roles, oldest)
    draws = draw(
        tree,
        execution.roles,
        sampling.max_trajectories,
        generator(sampling.seed, execution.execution),
        rule=sampling.draw,
        barred=barred,
    )
    ledger = account(tree, draws, barred)
    total = ledger.trained_tokens
    return [_trajectory(tree, drawn, advantage, total) for drawn in draws], ledger


def _trajectory(tree: TrajectoryTree, drawn: Draw, advantage: float, execution_tokens: int) -> Trajectory:
    path = tree.path(tree.nodes[drawn.leaf])
    mask = trainable(path, drawn)
    pure = all(node.tokens.kv_versions is node.tokens.versions for node in path)
    return Trajectory(
        execution=tree.execution,
        leaf=drawn.leaf,
        role=drawn.role,
        token_ids=_bytes(node.tokens.token_ids for node in path),
        trainable=mask.view(np.uint8).tobytes(),
        old_logprobs=_bytes(node.tokens.logprobs for node in path),
        versions=_bytes(node.tokens.versions for node in path),
        kv_versions=b"" if pure else _bytes(node.tokens.kv_versions for node in path),
        advantage=advantage,
        weight=int(mask.sum()) / execution_tokens,
    )


def _bytes(arrays: Iterable[Int32s | Float32s]) -> bytes:
    """One after the other, little-endian. Of a long path each array is large: one at a time is joined."""
    joined = np.concatenate(list(arrays))
    return joined.astype(joined.dtype.newbyteorder("<"), copy=False).tobytes()


def _micro_steps(
    group: str, step: int, trajectories: list[Trajectory], limit_tokens: int, ranks: int
) -> tuple[MicroStep, ...]:
    return tuple(
        MicroStep(
            id=f"{step}.{group}.{index}",
            step=step,
            group=group,
            trajectories=piece.trajectories,
            tree_tokens=piece.tree_tokens,
            batches=piece.batches,
        )
        for index, piece in enumerate(pack(trajectories, limit_tokens, ranks))
    )
