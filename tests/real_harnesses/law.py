"""The law: each token that an engine sampled is in one place, as it was sampled, and no other is trained."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from gyre.loss.microstep import Trajectory
from gyre.trajectory.ledger import Ledger
from gyre.trajectory.pack import ScoredExecution, plan_group
from gyre.trajectory.reader import JournalReader
from gyre.trajectory.records import UNFINISHED, CallRecord
from gyre.trajectory.roles import Roles, classify
from gyre.trajectory.rows import GroupOutcome
from gyre.trajectory.tree import TrajectoryTree
from tests.real_harnesses.engines import Sampled
from tests.real_harnesses.stage import SAMPLING, Run, Stage


@dataclass
class Kept:
    """What the journal kept of a run."""

    records: list[CallRecord]
    tree: TrajectoryTree
    roles: Roles
    ledger: Ledger

    def show(self) -> str:
        """A line a call, for people."""
        lines = []
        for node in self.tree.nodes:
            role, excluded = self.roles.of_node[node.index], self.excluded.get(node.call, "")
            said = [f"{message['role']}:{str(message.get('content'))[:40]!r}" for message in node.messages]
            parent = None if node.parent is None else self.tree.nodes[node.parent].call
            lines.append(f"{node.call} < {parent} {role} {excluded} {said[-4:]} -> {node.output_message}")
        return "\n".join(lines)

    def roles_count(self) -> dict[str, int]:
        return dict(Counter(self.roles.of_node))

    def paths(self, role: str = "main") -> int:
        """How many leaves have this role."""
        return sum(self.roles.of_node[leaf.index] == role for leaf in self.tree.leaves())

    @property
    def excluded(self) -> dict[str, str]:
        """Reasons by call."""
        return {entry.call: entry.reason for entry in self.ledger.excluded if entry.reason != "undelivered"}

    @property
    def lost_tokens(self) -> int:
        """Those that the proxy did not live to record."""
        return sum(self.tree.undelivered.values())


def check_law(stage: Stage, run: Run) -> Kept:
    """Of a run whose group is finished."""
    sampled = {call: its for call, its in stage.ledger.calls.items() if call.startswith(f"{run.execution}-")}
    with JournalReader(stage.journal) as reader:
        records = reader.calls(run.execution)
        outcome = reader.group(run.execution.partition(".")[0])
        undelivered = reader.undelivered(run.execution)
    assert outcome is not None
    for record in records:
        _check_record(record, sampled[record.call])
    assert undelivered == _lost(sampled, records)
    kept = _kept(run, records, undelivered)
    _check_prompts(kept.tree, sampled)
    _check_one_place(kept, sampled, outcome)
    group = stage.told.groups[outcome.group]
    _check_trained(
        [its for step in group.micro_steps for its in step.trajectories], kept.tree, kept.ledger, sampled
    )
    return kept


def _check_record(record: CallRecord, sampled: Sampled) -> None:
    """Bit for bit."""
    assert list(record.output_ids) == sampled.token_ids, record.call
    assert list(record.logprobs) == sampled.logprobs, record.call
    assert list(record.versions) == sampled.versions, record.call


def _lost(sampled: dict[str, Sampled], records: list[CallRecord]) -> dict[str, int]:
    """Tokens by call that are in no record."""
    recorded = {record.call: len(record.output_ids) for record in records}
    lost = {call: its.lost + len(its.token_ids) - recorded.get(call, 0) for call, its in sampled.items()}
    return {call: tokens for call, tokens in lost.items() if tokens}


def _kept(run: Run, records: list[CallRecord], undelivered: dict[str, int]) -> Kept:
    tree = TrajectoryTree(run.execution)
    for record in records:
        tree.add(record)
    tree.undelivered |= undelivered
    roles = classify(tree)
    assert run.result.score is not None
    ours = ScoredExecution(execution=run.execution, score=run.result.score, tree=tree, roles=roles)
    other = f"{run.execution.removesuffix('00')}01"
    empty = TrajectoryTree(other)
    theirs = ScoredExecution(execution=other, score=-1.0, tree=empty, roles=classify(empty))
    planned = plan_group(run.execution.partition(".")[0], 0, (ours, theirs), SAMPLING, 1 << 20)
    return Kept(records, tree, roles, planned.ledger)


def _check_prompts(tree: TrajectoryTree, sampled: dict[str, Sampled]) -> None:
    """A node's path is what the engine read, and what it sampled."""
    for node in tree.nodes:
        path, its = tree.path_tokens(node), sampled[node.call]
        assert path.token_ids.tolist() == [*its.prompt_ids, *its.token_ids], node.call
        own = node.tokens.sampled
        assert node.tokens.token_ids[own].tolist() == its.token_ids
        assert node.tokens.logprobs[own].tolist() == its.logprobs
        assert node.tokens.versions[own].tolist() == its.versions


def _check_one_place(kept: Kept, sampled: dict[str, Sampled], outcome: GroupOutcome) -> None:
    entries = [*kept.ledger.trained, *kept.ledger.excluded]
    places = Counter((entry.call, getattr(entry, "reason", "") == "undelivered") for entry in entries)
    assert set(places.values()) == {1}
    tokens: Counter[str] = Counter()
    for entry in entries:
        tokens[entry.call] += entry.tokens
    assert tokens == {call: its.lost + len(its.token_ids) for call, its in sampled.items()}
    unfinished = {record.call for record in kept.records if record.finish_reason == UNFINISHED}
    assert {call for call, reason in kept.excluded.items() if reason == "unfinished"} == unfinished
    # The job came to the same.
    assert outcome.trained_tokens == kept.ledger.trained_tokens
    assert outcome.excluded_tokens == kept.ledger.excluded_tokens


def _check_trained(
    trajectories: list[Trajectory], tree: TrajectoryTree, ledger: Ledger, sampled: dict[str, Sampled]
) -> None:
    """What a cell gets to train are those tokens, each once, with the numbers of the engine."""
    seen: Counter[tuple[str, int]] = Counter()
    for trajectory in trajectories:
        places: list[tuple[str, int] | None] = []
        for node in tree.path(tree.nodes[trajectory.leaf]):
            context = len(node.tokens.token_ids) - node.sampled_tokens
            places += [None] * context + [(node.call, at) for at in range(node.sampled_tokens)]
        mask = np.frombuffer(trajectory.trainable, np.uint8)
        ids, logprobs = (
            np.frombuffer(trajectory.token_ids, "<i4").tolist(),
            np.frombuffer(trajectory.old_logprobs, "<f4").tolist(),
        )
        assert len(mask) == len(places)
        for at in np.flatnonzero(mask):
            place = places[at]
            assert place is not None, "a token that the policy did not sample is trained"
            its = sampled[place[0]]
            assert (ids[at], logprobs[at]) == (its.token_ids[place[1]], its.logprobs[place[1]])
            seen[place] += 1
    trained = {entry.call for entry in ledger.trained}
    assert seen == Counter((call, at) for call in trained for at in range(len(sampled[call].token_ids)))
