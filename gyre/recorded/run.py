"""A run folder, read without the job: executions, their trees, and where each sampled token went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self

import msgspec

from gyre.actors.looking import CONTACT, ContactError, read_contact
from gyre.job import Job, JobError, load_recorded
from gyre.loss.microstep import Trajectory
from gyre.recorded.wal import torn_bytes
from gyre.trajectory.journal import JournalCorrupt
from gyre.trajectory.ledger import Ledger, Reason, all_excluded
from gyre.trajectory.pack import ScoredExecution, sample
from gyre.trajectory.reader import DamagedRow, ExecutionRow, JournalReader
from gyre.trajectory.roles import ExecutionCounts, Roles, classify, count
from gyre.trajectory.rows import GroupOutcome
from gyre.trajectory.tree import Node, TrajectoryTree, TreeError

JOURNAL = "journal.db"

State = Literal["running", "finished", "killed", "stopped"]


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a call's sampled tokens: `draw` trains them, or nobody for a `reason`, or (neither) it
    is not decided yet."""

    draw: int | None = None
    reason: Reason | None = None

    def __str__(self) -> str:
        return f"draw {self.draw}" if self.draw is not None else self.reason or "undecided"


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One execution. `draws` are the trajectories that are trained, in order. `ledger` is None while its
    group is not complete, or where the job's sampling is not known; `advantage` where it has none.
    `earlier_tokens` were sampled by attempts before the last, which are not in the tree."""

    row: ExecutionRow
    tree: TrajectoryTree
    roles: Roles
    counts: ExecutionCounts
    outcome: GroupOutcome | None
    advantage: float | None
    draws: tuple[Trajectory, ...]
    ledger: Ledger | None
    earlier_tokens: int

    @property
    def trained_tokens(self) -> int | None:
        return None if self.ledger is None else self.ledger.trained_tokens

    @property
    def excluded_tokens(self) -> dict[str, int]:
        """By reason, as far as it is decided; those of earlier attempts too."""
        found = self.ledger.excluded_tokens if self.ledger else {}
        return found | ({"earlier_attempt": self.earlier_tokens} if self.earlier_tokens else {})

    def fates(self) -> dict[str, Fate]:
        """By call, of those that sampled anything that is in their records."""
        if self.ledger is None:
            return {node.call: Fate() for node in self.tree.nodes if node.sampled_tokens}
        draw_of = {drawn.leaf: index for index, drawn in enumerate(self.draws)}
        found = {entry.call: Fate(draw=draw_of[entry.leaf]) for entry in self.ledger.trained}
        excluded = (entry for entry in self.ledger.excluded if entry.reason != "undelivered")
        return found | {entry.call: Fate(reason=entry.reason) for entry in excluded}

    def node(self, name: str) -> Node | None:
        """By its index or its call's id."""
        return next((node for node in self.tree.nodes if name in (str(node.index), node.call)), None)


class RecordedRun:
    """The run in `folder`, while it runs and after. `notes` are things that somebody who looks should know.
    Reads one execution at a time. Raises JournalError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.state = _state(folder)
        if self.state != "running" and (torn := _torn(folder)):
            self.notes.append(
                f"the last write to {JOURNAL} was cut short ({torn} bytes): it was not acknowledged to"
                " anybody; what came before is whole"
            )
        self.job: Job | None = None
        try:
            self.job = load_recorded(folder / "job.toml")
        except JobError as error:
            problem = " ".join(str(error).split())
            self.notes.append(f"{problem}; without it nobody knows which tokens were trained")
        self.reader = JournalReader(folder / JOURNAL)
        self._outcome = lru_cache(maxsize=64)(self.reader.group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()

    def each(self, group: str | None = None) -> Iterator[Recorded | DamagedRow]:
        """In order of execution id; where the journal cannot be read on, that is the last word."""
        try:
            for row in self.reader.scan(group):
                yield row if isinstance(row, DamagedRow) else self._recorded_or_damaged(row)
        except JournalCorrupt as error:
            yield DamagedRow(execution="what follows", reason=error.reason)

    def _recorded_or_damaged(self, row: ExecutionRow) -> Recorded | DamagedRow:
        try:
            return self.recorded(row)
        except (JournalCorrupt, TreeError) as error:
            return DamagedRow(execution=row.execution, reason=error.reason)

    def recorded(self, row: ExecutionRow) -> Recorded:
        """Raises JournalCorrupt, TreeError."""
        execution = row.execution
        tree = TrajectoryTree(execution)
        for record in self.reader.calls(execution):
            tree.add(record)
        tree.undelivered = self.reader.undelivered(execution)
        roles = classify(tree)
        outcome = self._outcome(row.spec.group)
        draws, ledger = self._where_tokens_went(row, tree, roles, outcome)
        counts = row.ended.counts if row.ended else count(tree, roles, self.reader.retries(execution))
        return Recorded(
            row=row,
            tree=tree,
            roles=roles,
            counts=counts,
            outcome=outcome,
            advantage=outcome.advantages.get(execution) if outcome else None,
            draws=tuple(draws),
            ledger=ledger,
            earlier_tokens=self.reader.earlier_tokens(execution),
        )

    def _where_tokens_went(
        self, row: ExecutionRow, tree: TrajectoryTree, roles: Roles, outcome: GroupOutcome | None
    ) -> tuple[list[Trajectory], Ledger | None]:
        if (reason := _excluded_whole(row, outcome, self.folder / JOURNAL)) is not None:
            return [], all_excluded(tree, reason)
        if outcome is None or row.ended is None or row.ended.result.score is None or self.job is None:
            return [], None
        scored = ScoredExecution(
            execution=row.execution, score=row.ended.result.score, tree=tree, roles=roles
        )
        advantage = outcome.advantages[row.execution]
        return sample(scored, advantage, self.job.sampling, outcome.step)


def _excluded_whole(row: ExecutionRow, outcome: GroupOutcome | None, journal: Path) -> Reason | None:
    """Why no call of an execution is trained, where that is so whatever the draw. Raises JournalCorrupt."""
    if row.spec.split == "eval":
        return "evaluation"
    if row.ended is not None and row.ended.result.score is None:
        return "dropped"
    if outcome is None or row.ended is None:
        return None
    if outcome.discarded:
        return "discarded_group"
    if row.execution not in outcome.advantages:
        raise JournalCorrupt(journal, f"its group {row.spec.group} is complete and has no advantage for it")
    return None if outcome.advantages[row.execution] else "zero_advantage"


def _state(folder: Path) -> State:
    with suppress(ContactError):
        return "killed" if read_contact(folder / CONTACT).is_gone else "running"
    return "finished" if (folder / "summary.json").exists() else "stopped"


def _torn(folder: Path) -> int:
    try:
        return torn_bytes(folder / f"{JOURNAL}-wal")
    except OSError:
        return 0  # the reader says what is wrong
