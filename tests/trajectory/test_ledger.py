from __future__ import annotations

import random as std_random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cell.engine import SampledLeg
from gyre.trajectory.book import Book, ExecutionError
from gyre.trajectory.config import DrawRule, SamplingConfig
from gyre.trajectory.ledger import Ledger, account, undelivered
from gyre.trajectory.pack import PlannedGroup, ScoredExecution, plan_group
from gyre.trajectory.records import UNFINISHED, RecordSampled
from gyre.trajectory.roles import classify
from gyre.trajectory.sampling import Draw
from tests.trajectory.trees import random_records, record, result, spec, tree_of, user

STEP = 8

samplings = st.builds(
    SamplingConfig,
    draw=st.sampled_from(["paper", "coverage", "all"]),
    max_trajectories=st.integers(1, 4),
    max_staleness=st.none() | st.integers(0, 9),
    advantage=st.sampled_from(["mean_std", "mean", "leave_one_out"]),
    shuffle_advantages=st.booleans(),
)


@st.composite
def groups(draw: st.DrawFn) -> list[ScoredExecution]:
    found = []
    for index in range(draw(st.integers(1, 4))):
        records = draw(random_records(execution=f"g000000.{index:02d}", max_calls=6))
        tree = tree_of(*records)
        for lost in range(draw(st.integers(0, 2))):
            out = [3] * (lost + 1)
            tree.add(record(f"lost {lost}", out=out, execution=tree.execution, finish_reason=UNFINISHED))
        tree.undelivered = draw(
            st.dictionaries(st.sampled_from(["c00", "lost 0", "gone"]), st.integers(1, 9))
        )
        score = draw(st.sampled_from([0.0, 0.5, 1.0]))
        found.append(ScoredExecution(execution=tree.execution, score=score, tree=tree, roles=classify(tree)))
    return found


def trained_positions(planned: PlannedGroup, executions: list[ScoredExecution]) -> Counter[tuple[str, str]]:
    """Tokens that micro-steps train, by execution and call, as their masks say."""
    trees = {execution.execution: execution.tree for execution in executions}
    found: Counter[tuple[str, str]] = Counter()
    for micro_step in planned.micro_steps:
        for trajectory in micro_step.trajectories:
            tree = trees[trajectory.execution]
            at, mask = 0, np.frombuffer(trajectory.trainable, np.uint8)
            for node in tree.path(tree.nodes[trajectory.leaf]):
                end = at + len(node.tokens.sampled)
                assert not (mask[at:end] & ~node.tokens.sampled).any()
                found[tree.execution, node.call] += int(mask[at:end].sum())
                at = end
    return +found


@settings(max_examples=50)
@given(groups(), samplings, st.integers(1, 60), st.randoms())
def test_every_sampled_token_is_in_exactly_one_place(
    executions: list[ScoredExecution], sampling: SamplingConfig, limit: int, random: std_random.Random
) -> None:
    planned = plan_group("g000000", STEP, executions, sampling, limit)
    trained = Counter({(its.execution, its.call): its.tokens for its in planned.ledger.trained})
    excluded: Counter[tuple[str, str]] = Counter()
    for its in planned.ledger.excluded:
        excluded[its.execution, its.call] += its.tokens
    sampled: Counter[tuple[str, str]] = Counter()
    entries = 0
    for execution in executions:
        tree = execution.tree
        nodes = {node.call: node.sampled_tokens for node in tree.nodes if node.sampled_tokens}
        for tokens_of in (nodes, tree.unfinished, tree.undelivered):
            sampled.update({(execution.execution, call): tokens for call, tokens in tokens_of.items()})
            entries += len(tokens_of)
    assert len(planned.ledger.trained) + len(planned.ledger.excluded) == entries
    assert trained + excluded == sampled
    assert sampled.total() == sum(execution.tree.sampled_tokens for execution in executions)
    assert trained == trained_positions(planned, executions)
    random.shuffle(executions)
    assert plan_group("g000000", STEP, executions, sampling, limit) == planned


@settings(max_examples=50)
@given(groups(), samplings)
def test_a_reason_is_true(executions: list[ScoredExecution], sampling: SamplingConfig) -> None:
    planned = plan_group("g000000", STEP, executions, sampling, 60)
    trees = {execution.execution: execution.tree for execution in executions}
    versions = {
        (execution, node.call): node.tokens.versions.max(initial=-1)
        for execution, tree in trees.items()
        for node in tree.nodes
    }
    draws = Counter(t.execution for micro_step in planned.micro_steps for t in micro_step.trajectories)
    limit = sampling.max_staleness
    for its in planned.ledger.excluded:
        age = STEP - versions.get((its.execution, its.call), STEP)
        match its.reason:
            case "discarded_group":
                assert len(executions) < 2
            case "unfinished" | "undelivered" as name:
                assert its.call in getattr(trees[its.execution], name)
            case "zero_advantage":
                assert planned.advantages[its.execution] == 0.0
            case "stale":
                assert limit is not None and age > limit
            case "not_drawn":
                assert sampling.draw != "all" and draws[its.execution] == sampling.max_trajectories
            case other:
                raise AssertionError(other)
    if limit is not None:
        assert all(STEP - versions[its.execution, its.call] <= limit for its in planned.ledger.trained)


@pytest.mark.parametrize("rule", ["paper", "coverage", "all"])
def test_a_title_is_listed_as_auxiliary_and_weighs_nothing(rule: DrawRule) -> None:
    executions = []
    for index, sampled in enumerate([(1, 2, 3, 4), ()]):
        name = f"g000000.{index:02d}"
        task = [user("Fix the bug in the parser.")]
        tree = tree_of(
            *[record("title", out=sampled, execution=name, messages=task, has_tools=False)] * bool(sampled),
            record("a", new=[5], execution=name, messages=task),
        )
        its = ScoredExecution(execution=name, score=float(index), tree=tree, roles=classify(tree))
        executions.append(its)
    planned = plan_group("g000000", STEP, executions, SamplingConfig(draw=rule), 60)
    assert planned.ledger.excluded_tokens == {"auxiliary": 4}
    trained = [(t.execution, t.role, t.weight) for m in planned.micro_steps for t in m.trajectories]
    assert sorted(trained) == [("g000000.00", "main", 1.0), ("g000000.01", "main", 1.0)]


def test_a_call_that_two_draws_train_is_an_error() -> None:
    tree = tree_of(record("a"), record("b", "a"), record("c", "a"))
    draws = [Draw(leaf=leaf, role="main", trains=frozenset([0, leaf])) for leaf in (1, 2)]
    with pytest.raises(ValueError, match=r"g000000\.00: call a is trained twice"):
        account(tree, draws, {})


def test_what_has_no_tree_in_the_group_is_listed_by_its_counts() -> None:
    book = Book()
    for execution, score in {"g000000.00": 1.0, "g000000.01": None}.items():
        for attempt in (1, 2):
            book.open(spec(execution, attempt=attempt))
            book.record(record("a", out=[1] * attempt, execution=execution))
        book.close(book.end(spec(execution), result(execution, score)))
    assert book.group("g000000").excluded_tokens(Ledger()) == {"dropped": 2, "earlier_attempt": 2}


def test_what_was_in_flight_when_an_execution_ended_is_listed_as_unfinished() -> None:
    book = Book()
    for execution, score in {"g000000.00": 1.0, "g000000.01": None}.items():
        book.open(spec(execution))
        book.record(record("a", execution=execution))
        book.record(record("b", "a", out=[4, 5], execution=execution, finish_reason=UNFINISHED))
        book.close(book.end(spec(execution), result(execution, score)))
    group = book.group("g000000")
    assert [ended.counts.sampled_tokens for ended in group.ended.values()] == [3, 3]
    (scored,) = group.scored.values()
    its = account(scored.tree, [Draw(leaf=0, role="main", trains=frozenset([0]))], {})
    assert (its.trained_tokens, group.excluded_tokens(its)) == (1, {"dropped": 3, "unfinished": 2})


stays = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=6)


@given(stays, st.booleans(), st.randoms())
def test_what_was_not_delivered_is_what_living_engines_sampled_beyond_the_record(
    stays: list[tuple[int, int, bool]], in_record: bool, random: std_random.Random
) -> None:
    """A stay: so many tokens were delivered, so many were not, and whether its engine lives to tell."""
    legs, ends, lost, position = [], [], 0, 0
    for stay, (delivered, more, lives) in enumerate(stays):
        if lives:
            legs.append(SampledLeg(call="c", stay=stay, tokens=delivered + more))
            lost += more if in_record else delivered + more
        position += delivered
        ends.append(position)
    random.shuffle(legs)
    found = undelivered(legs, {"c": ends} if in_record else {})
    assert found == ({"c": lost} if lost else {})


def test_what_engines_sampled_and_no_record_has_is_listed_as_undelivered() -> None:
    book = Book()
    for execution, score in {"g000000.00": 1.0, "g000000.01": None}.items():
        book.open(spec(execution))
        first, second = f"{execution}-1-0000", f"{execution}-1-0001"
        book.record(record(first, out=[4, 5, 6], execution=execution, moved_at=(2,)))
        legs = [(first, 0, 4), (first, 1, 1), (second, 0, 3), (f"{execution}-0-0000", 0, 9)]
        told = RecordSampled(
            execution=execution,
            legs=tuple(SampledLeg(call=call, stay=stay, tokens=tokens) for call, stay, tokens in legs),
        )
        for _ in range(2):
            assert book.sampled(told) == {first: 2, second: 3}
        book.close(book.end(spec(execution), result(execution, score)))
        with pytest.raises(ExecutionError, match="too late"):
            book.sampled(told)
    group = book.group("g000000")
    assert [ended.counts.sampled_tokens for ended in group.ended.values()] == [8, 8]
    (scored,) = group.scored.values()
    its = account(scored.tree, [Draw(leaf=0, role="main", trains=frozenset([0]))], {})
    assert (its.trained_tokens, group.excluded_tokens(its)) == (3, {"dropped": 8, "undelivered": 5})


def test_of_an_evaluation_nothing_is_trained() -> None:
    book = Book()
    book.open(spec("e000000.00"))
    book.record(record("a", out=[1] * 3, execution="e000000.00"))
    book.close(book.end(spec("e000000.00"), result("e000000.00", 1.0)))
    assert book.group("e000000").excluded_tokens(Ledger()) == {"evaluation": 3}
