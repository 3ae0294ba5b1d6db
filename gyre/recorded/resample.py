"""What would have been trained under another way of sampling: the groups of a run, planned again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from gyre.recorded.run import RecordedRun
from gyre.trajectory.book import Book, ExecutionError, Group
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.journal import JournalCorrupt
from gyre.trajectory.pack import plan_group
from gyre.trajectory.resume import restore
from gyre.trajectory.rows import GroupOutcome
from gyre.trajectory.tree import TreeError


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Of one group or, added up, of many. `roles` counts trajectories by that of their leaf. `row_tokens` are
    those of all trajectories, trained or not; in `tree_tokens` a prefix that is shared in a micro-step counts
    once."""

    trajectories: int = 0
    roles: dict[str, int] = {}
    trained_tokens: int = 0
    excluded_tokens: dict[str, int] = {}
    micro_steps: int = 0
    row_tokens: int = 0
    tree_tokens: int = 0

    def __add__(self, other: Plan) -> Plan:
        return Plan(
            trajectories=self.trajectories + other.trajectories,
            roles=_added(self.roles, other.roles),
            trained_tokens=self.trained_tokens + other.trained_tokens,
            excluded_tokens=_added(self.excluded_tokens, other.excluded_tokens),
            micro_steps=self.micro_steps + other.micro_steps,
            row_tokens=self.row_tokens + other.row_tokens,
            tree_tokens=self.tree_tokens + other.tree_tokens,
        )


class Resampled(msgspec.Struct, frozen=True, kw_only=True):
    """A group as it was planned (by this version of Gyre, from the run's own keys) and as it would be."""

    group: str
    step: int
    scores: dict[str, float]
    advantages: dict[str, float]
    was: Plan
    would_be: Plan


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """All that a plan depends on but the group."""

    sampling: SamplingConfig
    micro_step_tokens: int
    ranks: int


def resample(
    run: RecordedRun, was: Way, would_be: Way, damaged: Callable[[str, str], None], group: str | None = None
) -> Iterator[Resampled]:
    """Every complete training group (or one), in order, one in memory at a time. `damaged` is told of a group
    that cannot be read, and why. Raises JournalCorrupt where no list of groups is to be had."""
    outcomes = run.reader.groups() if group is None else filter(None, [run.reader.group(group)])
    for outcome in outcomes:
        if outcome.split != "train":
            continue
        try:
            found = _restored(run, outcome.group)
        except (JournalCorrupt, TreeError, ExecutionError) as error:
            damaged(outcome.group, str(error))
            continue
        before, _ = _planned(found, outcome, was)
        after, advantages = _planned(found, outcome, would_be)
        yield Resampled(
            group=outcome.group,
            step=outcome.step,
            scores=found.scores,
            advantages=advantages,
            was=before,
            would_be=after,
        )


def _restored(run: RecordedRun, group: str) -> Group:
    rows = run.reader.executions(group)
    if not rows:
        raise ExecutionError(group, "none of its executions is in the journal")
    book = Book()
    for row in rows:
        restore(book, run.reader, row)
    return book.group(group)


def _planned(found: Group, outcome: GroupOutcome, way: Way) -> tuple[Plan, dict[str, float]]:
    planned = plan_group(
        found.id, outcome.step, found.scored.values(), way.sampling, way.micro_step_tokens, way.ranks
    )
    drawn = [trajectory for micro_step in planned.micro_steps for trajectory in micro_step.trajectories]
    plan = Plan(
        trajectories=len(drawn),
        roles=dict(sorted(Counter(trajectory.role for trajectory in drawn).items())),
        trained_tokens=planned.ledger.trained_tokens,
        excluded_tokens=found.excluded_tokens(planned.ledger),
        micro_steps=len(planned.micro_steps),
        row_tokens=sum(micro_step.length_tokens for micro_step in planned.micro_steps),
        tree_tokens=sum(micro_step.tree_tokens for micro_step in planned.micro_steps),
    )
    return plan, planned.advantages


def _added(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return dict(sorted((Counter(left) + Counter(right)).items()))
