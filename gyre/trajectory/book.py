"""What the TrajectoryActor knows, without I/O: open executions, groups that are not complete, sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from gyre.trajectory.ledger import Ledger, Reason, undelivered
from gyre.trajectory.messages import EvalScore, IncompleteGroup, ResumeState, StepReward, Totals
from gyre.trajectory.pack import ScoredExecution
from gyre.trajectory.records import (
    CallRecord,
    ExecutionResult,
    ExecutionSpec,
    RecordSampled,
    is_call_of,
)
from gyre.trajectory.roles import ExecutionCounts, classify, count
from gyre.trajectory.rows import EndedExecution, GroupOutcome
from gyre.trajectory.tree import TrajectoryTree


class ExecutionError(ValueError):
    """A message about an execution that does not fit what is known of it."""

    def __init__(self, execution: str, reason: str) -> None:
        super().__init__(f"execution {execution}: {reason}")
        self.execution = execution
        self.reason = reason


def group_number(group: str) -> int:
    """The number in a group id such as `g000012`. Raises ValueError."""
    if group[:1] not in ("g", "e") or not group[1:].isdecimal():
        raise ValueError(f"group id {group!r}: expected g or e and digits, such as g000012")
    return int(group[1:])


class OpenExecution(msgspec.Struct, kw_only=True):
    """An attempt that runs."""

    spec: ExecutionSpec
    tree: TrajectoryTree
    retries: int = 0


class Group(msgspec.Struct, kw_only=True):
    """A group until it is complete. `scored` keeps the trees of training executions only; `earlier_tokens`
    were sampled by attempts that were begun anew."""

    id: str
    first: ExecutionSpec
    ended: dict[str, EndedExecution] = {}
    scored: dict[str, ScoredExecution] = {}
    earlier_tokens: int = 0

    @property
    def complete(self) -> bool:
        return len(self.ended) >= self.first.group_executions

    @property
    def scores(self) -> dict[str, float]:
        """Of scored executions, in order of id."""
        return {
            execution: ended.result.score
            for execution, ended in sorted(self.ended.items())
            if ended.result.score is not None
        }

    def excluded_tokens(self, ledger: Ledger) -> dict[str, int]:
        """Of all that was sampled for it what is not trained, by reason. `ledger` is of its scored
        executions, empty for an evaluation."""
        found: dict[str, int] = dict(ledger.excluded_tokens)
        for reason, tokens in self._without_tree():
            if tokens:
                found[reason] = found.get(reason, 0) + tokens
        return dict(sorted(found.items()))

    def _without_tree(self) -> Iterator[tuple[Reason, int]]:
        yield "earlier_attempt", self.earlier_tokens
        for ended in self.ended.values():
            if self.first.split == "eval":
                yield "evaluation", ended.counts.sampled_tokens
            elif ended.result.score is None:
                yield "dropped", ended.counts.sampled_tokens


class Book:
    """State changes in the order of messages; every method is quick and raises ExecutionError."""

    def __init__(self) -> None:
        self._open: dict[str, OpenExecution] = {}
        self._ending: dict[str, EndedExecution] = {}
        self._groups: dict[str, Group] = {}
        self._outcomes: dict[str, GroupOutcome] = {}
        self._seen: set[str] = set()
        self._sums = ExecutionCounts()
        self._ended = 0
        self._dropped = 0

    def open(self, spec: ExecutionSpec) -> None:
        """An attempt begins; an earlier one is forgotten."""
        group = self._group(spec)
        if spec.execution in group.ended or spec.execution in self._ending:
            raise ExecutionError(spec.execution, "it has ended, it cannot be opened again")
        if earlier := self._open.get(spec.execution):
            self.forgot(spec.group, earlier.tree.sampled_tokens)
        self._open[spec.execution] = OpenExecution(spec=spec, tree=TrajectoryTree(spec.execution))

    def forgot(self, group: str, tokens: int) -> None:
        """So many were sampled by an attempt that was begun anew. Raises KeyError as `group` does."""
        self._groups[group].earlier_tokens += tokens

    def record(self, record: CallRecord) -> None:
        """A call; the same again changes nothing. Raises TreeError too."""
        running = self._open.get(record.execution)
        if running is None:
            raise ExecutionError(record.execution, f"it is not open, call {record.call} comes too late")
        running.tree.add(record)

    def sampled(self, message: RecordSampled) -> dict[str, int]:
        """What engines sampled for an open execution. Answers what of its attempt was not delivered, by
        call."""
        execution = message.execution
        running = self._open.get(execution)
        if running is None:
            raise ExecutionError(execution, "it is not open, what was sampled for it comes too late")
        attempt = running.spec.attempt
        legs = [leg for leg in message.legs if is_call_of(leg.call, execution, attempt)]
        found = undelivered(legs, running.tree.ends)
        self.lost(execution, found)
        return found

    def lost(self, execution: str, undelivered: dict[str, int]) -> None:
        """So much of an open execution's calls is in no record. Raises KeyError."""
        self._open[execution].tree.undelivered |= undelivered

    def retried(self, execution: str, times: int = 1) -> bool:
        """False: it is over, the retry tells nothing any more."""
        if running := self._open.get(execution):
            running.retries += times
        return running is not None

    def end(self, spec: ExecutionSpec, result: ExecutionResult) -> EndedExecution:
        """The execution takes no more calls. Asked again, the answer is the same."""
        group = self._group(spec)
        if known := group.ended.get(spec.execution) or self._ending.get(spec.execution):
            return known
        if group.complete:
            raise ExecutionError(spec.execution, f"its group {group.id} is complete without it")
        running = self._open.pop(spec.execution, None)
        if running is None:  # It never got as far as a call.
            running = OpenExecution(spec=spec, tree=TrajectoryTree(spec.execution))
        roles = classify(running.tree)
        if result.score is not None and spec.split == "train":
            group.scored[spec.execution] = ScoredExecution(
                execution=spec.execution, score=result.score, tree=running.tree, roles=roles
            )
        counts = count(running.tree, roles, running.retries)
        ended = EndedExecution(spec=spec, result=result, counts=counts)
        self._ending[spec.execution] = ended
        return ended

    def close(self, ended: EndedExecution) -> bool:
        """The end is durable. True the first time that it is said."""
        group = self._group(ended.spec)
        execution = ended.spec.execution
        if execution in group.ended:
            return False
        self._ending.pop(execution, None)
        group.ended[execution] = ended
        self.add_to_totals(ended)
        return True

    def group(self, group: str) -> Group:
        """Raises KeyError where none of its executions was opened."""
        return self._groups[group]

    def finish(self, outcome: GroupOutcome) -> None:
        """The group is planned (or its evaluation is known): its trees are no longer needed."""
        self._seen.add(outcome.group)
        self._outcomes[outcome.group] = outcome
        if group := self._groups.get(outcome.group):
            group.scored.clear()

    def add_to_totals(self, ended: EndedExecution) -> None:
        self._ended += 1
        self._dropped += ended.result.score is None
        self._sums = ExecutionCounts(
            calls=self._sums.calls + ended.counts.calls,
            sampled_tokens=self._sums.sampled_tokens + ended.counts.sampled_tokens,
            compactions=self._sums.compactions + ended.counts.compactions,
            sub_agents=self._sums.sub_agents + ended.counts.sub_agents,
            retries=self._sums.retries + ended.counts.retries,
            tool_calls=self._sums.tool_calls + ended.counts.tool_calls,
            malformed_tool_calls=self._sums.malformed_tool_calls + ended.counts.malformed_tool_calls,
        )

    def saw(self, group: str) -> None:
        """This group's number is used."""
        self._seen.add(group)

    def counts(self) -> dict[str, int]:
        """What is under way and what was, in numbers."""
        return {
            "executions_open": len(self._open),
            "groups_incomplete": sum(not group.complete for group in self._groups.values()),
            "executions_ended": self._ended,
            "executions_dropped": self._dropped,
            "calls": self._sums.calls,
            "retries": self._sums.retries,
        }

    def totals(self) -> Totals:
        by_step: dict[int, list[float]] = {}
        evals = []
        excluded: Counter[str] = Counter()
        for _, outcome in sorted(self._outcomes.items()):
            excluded.update(outcome.excluded_tokens)
            scores = list(outcome.scores.values())
            if outcome.split == "train":
                by_step.setdefault(outcome.step, []).extend(scores)
            elif scores:
                evals.append(
                    EvalScore(
                        step=outcome.step, version=outcome.version, score=mean(scores), executions=len(scores)
                    )
                )
        rewards = tuple(
            StepReward(step=step, mean=mean(scores), executions=len(scores))
            for step, scores in sorted(by_step.items())
            if scores
        )
        return Totals(
            executions=self._ended,
            dropped=self._dropped,
            calls=self._sums.calls,
            sampled_tokens=self._sums.sampled_tokens,
            compactions=self._sums.compactions,
            sub_agents=self._sums.sub_agents,
            retries=self._sums.retries,
            tool_calls=self._sums.tool_calls,
            malformed_tool_calls=self._sums.malformed_tool_calls,
            rewards=rewards,
            evals=tuple(evals),
            trained_tokens=sum(outcome.trained_tokens for outcome in self._outcomes.values()),
            excluded_tokens=dict(sorted(excluded.items())),
            groups_without_signal=sum(outcome.without_signal for outcome in self._outcomes.values()),
        )

    def resume_state(self) -> ResumeState:
        train = sorted((group for group in self._groups.values() if group.id[0] == "g"), key=lambda g: g.id)
        return ResumeState(
            finished=tuple(group.id for group in train if group.complete),
            incomplete=tuple(
                IncompleteGroup(
                    group=group.id,
                    task=group.first.task,
                    ended=tuple(sorted(group.ended)),
                    refills=self._refills(group.id),
                )
                for group in train
                if not group.complete
            ),
            next_group=self._next("g"),
            next_eval=self._next("e"),
        )

    def _refills(self, group: str) -> dict[str, int]:
        specs = (running.spec for _, running in sorted(self._open.items()))
        return {spec.execution: spec.refill for spec in specs if spec.group == group and spec.refill}

    def _next(self, letter: str) -> int:
        return max((group_number(group) + 1 for group in self._seen if group[0] == letter), default=0)

    def _group(self, spec: ExecutionSpec) -> Group:
        if spec.group not in self._groups:
            if spec.group_executions < 1:
                raise ExecutionError(spec.execution, f"its group {spec.group} has no executions")
            group_number(spec.group)
            self._seen.add(spec.group)
            self._groups[spec.group] = Group(id=spec.group, first=spec)
        return self._groups[spec.group]


def mean(values: list[float]) -> float:
    """Of at least one value."""
    return sum(values) / len(values)
