"""From a complete group to micro-steps: a pure function of the group's content, whoever ended first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from gyre.loss.microstep import MicroStep, Trajectory
from gyre.trajectory.advantage import advantages, shuffled
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.roles import Roles
from gyre.trajectory.sampling import draw, generator, trainable
from gyre.trajectory.tree import TrajectoryTree

# A score relative to fewer tells nothing.
MIN_SCORED = 2


class ScoredExecution(msgspec.Struct, frozen=True, kw_only=True):
    """An execution of a group that was not dropped. A placeholder has an empty tree."""

    execution: str
    score: float
    tree: TrajectoryTree
    roles: Roles


class PlannedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """`executions` count in the step's mean, those without tokens too; a discarded group brings none."""

    group: str
    step: int
    executions: int
    scores: dict[str, float]
    advantages: dict[str, float]
    micro_steps: tuple[MicroStep, ...]
    discarded: bool


def plan_group(
    group: str,
    step: int,
    executions: Iterable[ScoredExecution],
    sampling: SamplingConfig,
    micro_step_tokens: int,
) -> PlannedGroup:
    """Advantages over all executions, sampling inside each, packing over all. A group without a signal
    (equal scores) has no micro-steps; one with fewer than two executions is discarded."""
    ordered = sorted(executions, key=lambda execution: execution.execution)
    scores = {execution.execution: execution.score for execution in ordered}
    discarded = len(ordered) < MIN_SCORED
    relative = {} if discarded else advantages(scores, sampling.advantage)
    if sampling.shuffle_advantages:
        relative = shuffled(relative, generator(sampling.seed, group))
    trajectories = [
        trajectory
        for execution in ordered
        if any(relative.values())
        for trajectory in sample(execution, relative[execution.execution], sampling)
    ]
    micro_steps = tuple(
        MicroStep(id=f"{step}.{group}.{index}", step=step, group=group, trajectories=tuple(packed))
        for index, packed in enumerate(pack(trajectories, micro_step_tokens))
    )
    return PlannedGroup(
        group=group,
        step=step,
        executions=0 if discarded else len(ordered),
        scores=scores,
        advantages=relative,
        micro_steps=micro_steps,
        discarded=discarded,
    )


def sample(execution: ScoredExecution, advantage: float, sampling: SamplingConfig) -> list[Trajectory]:
    """The drawn trajectories of an execution, with weights that sum to 1."""
    tree = execution.tree
    random = generator(sampling.seed, execution.execution)
    draws = draw(tree, execution.roles, sampling.max_trajectories, random)
    paths = [tree.path(tree.nodes[drawn.leaf]) for drawn in draws]
    masks = [trainable(path, drawn) for path, drawn in zip(paths, draws, strict=True)]
    total = sum(int(mask.sum()) for mask in masks)
    trajectories = []
    for drawn, mask in zip(draws, masks, strict=True):
        tokens = tree.path_tokens(tree.nodes[drawn.leaf])
        pure = np.array_equal(tokens.versions, tokens.kv_versions)
        trajectories.append(
            Trajectory(
                execution=execution.execution,
                leaf=drawn.leaf,
                role=drawn.role,
                token_ids=tokens.token_ids.astype("<i4").tobytes(),
                trainable=mask.astype(np.uint8).tobytes(),
                old_logprobs=tokens.logprobs.astype("<f4").tobytes(),
                versions=tokens.versions.astype("<i4").tobytes(),
                kv_versions=b"" if pure else tokens.kv_versions.astype("<i4").tobytes(),
                advantage=advantage,
                weight=int(mask.sum()) / total,
            )
        )
    return trajectories


def pack(trajectories: Sequence[Trajectory], limit_tokens: int) -> list[list[Trajectory]]:
    """Longest first into one micro-step after the other, each at most `limit_tokens` when its rows are padded
    to its longest; a trajectory beyond the limit gets its own."""
    ordered = sorted(trajectories, key=lambda t: (-t.length_tokens, t.execution, t.leaf))
    packed: list[list[Trajectory]] = []
    for trajectory in ordered:
        if packed and (len(packed[-1]) + 1) * packed[-1][0].length_tokens <= limit_tokens:
            packed[-1].append(trajectory)
        else:
            packed.append([trajectory])
    return packed
