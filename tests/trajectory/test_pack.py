from __future__ import annotations

import random as std_random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gyre.loss.microstep import Trajectory
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.pack import PlannedGroup, ScoredExecution, plan_group
from gyre.trajectory.records import CallRecord
from gyre.trajectory.roles import classify
from gyre.trajectory.tree import TrajectoryTree
from tests.trajectory.trees import random_records, record, tree_of

SAMPLING = SamplingConfig()


def scored(index: int, score: float, *records: CallRecord) -> ScoredExecution:
    tree = tree_of(*records) if records else TrajectoryTree(f"g000000.{index:02d}")
    return ScoredExecution(execution=tree.execution, score=score, tree=tree, roles=classify(tree))


def line(index: int, score: float, tokens: int = 4) -> ScoredExecution:
    """An execution of one call: 2 tokens of prompt, the others sampled."""
    execution = f"g000000.{index:02d}"
    return scored(index, score, record("a", out=[3] * (tokens - 2), execution=execution, version=index))


def plan(
    *executions: ScoredExecution, sampling: SamplingConfig = SAMPLING, micro_step_tokens: int = 64
) -> PlannedGroup:
    return plan_group("g000000", 3, executions, sampling, micro_step_tokens)


def trajectories(planned: PlannedGroup) -> list[Trajectory]:
    return [trajectory for micro_step in planned.micro_steps for trajectory in micro_step.trajectories]


def by_execution(planned: PlannedGroup) -> list[Trajectory]:
    return sorted(trajectories(planned), key=lambda trajectory: trajectory.execution)


@st.composite
def groups(draw: st.DrawFn) -> list[ScoredExecution]:
    count = draw(st.integers(2, 4))
    return [
        scored(
            index,
            draw(st.sampled_from([0.0, 0.5, 1.0])),
            *draw(random_records(execution=f"g000000.{index:02d}", max_calls=6)),
        )
        for index in range(count)
    ]


def test_a_trajectory_holds_what_was_recorded() -> None:
    first, second = by_execution(plan(line(0, 0.0, tokens=4), line(1, 1.0, tokens=3)))
    assert np.frombuffer(first.token_ids, "<i4").tolist() == [1, 2, 3, 3]
    assert list(first.trainable) == [0, 0, 1, 1]
    assert np.frombuffer(first.old_logprobs, "<f4").tolist() == [0, 0, -0.5, -1.0]
    assert np.frombuffer(second.versions, "<i4").tolist() == [-1, -1, 1]
    assert (first.kv_versions, second.kv_versions) == (b"", b"")
    assert (first.execution, first.leaf, first.role, first.advantage) == ("g000000.00", 0, "main", -1.0)
    assert second.advantage == 1.0


def test_a_trajectory_says_which_tokens_were_sampled_over_older_kv() -> None:
    mixed = replace(record("a", out=[3, 4], version=5, execution="g000000.00"), kv_versions=(5, 3))
    found, _ = by_execution(plan(scored(0, 0.0, mixed), line(1, 1.0)))
    assert np.frombuffer(found.versions, "<i4").tolist() == [-1, -1, 5, 5]
    assert np.frombuffer(found.kv_versions, "<i4").tolist() == [-1, -1, 5, 3]


def test_micro_steps_are_named_by_step_group_and_index() -> None:
    planned = plan(line(0, 0.0, tokens=40), line(1, 1.0, tokens=42), micro_step_tokens=41)
    assert [micro_step.id for micro_step in planned.micro_steps] == ["3.g000000.0", "3.g000000.1"]
    assert {(micro_step.step, micro_step.group) for micro_step in planned.micro_steps} == {(3, "g000000")}


def test_equal_scores_bring_no_micro_steps_but_count() -> None:
    planned = plan(line(0, 0.5), line(1, 0.5))
    assert planned.micro_steps == ()
    assert (planned.executions, planned.discarded) == (2, False)


@pytest.mark.parametrize("executions", [[], [line(0, 1.0)]])
def test_fewer_than_two_scored_executions_are_discarded(executions: list[ScoredExecution]) -> None:
    planned = plan(*executions)
    assert (planned.discarded, planned.executions, planned.micro_steps) == (True, 0, ())


def test_a_placeholder_counts_in_statistics_and_executions_but_brings_no_tokens() -> None:
    planned = plan(line(0, 1.0), scored(1, 0.0))
    assert planned.executions == 2
    assert planned.advantages == {"g000000.00": 1.0, "g000000.01": -1.0}
    assert [trajectory.execution for trajectory in trajectories(planned)] == ["g000000.00"]


def test_weights_are_shares_of_the_executions_trainable_tokens() -> None:
    branching = scored(
        0, 1.0, record("a", out=[3] * 2), record("b", "a", out=[4] * 2), record("c", "a", out=[5] * 6)
    )
    weights = {t.leaf: (t.trainable_tokens, t.weight) for t in trajectories(plan(branching, scored(1, 0.0)))}
    assert weights in ({1: (4, 0.4), 2: (6, 0.6)}, {1: (2, 0.2), 2: (8, 0.8)})


def test_shuffled_advantages_are_a_permutation_fixed_by_the_seed() -> None:
    group = [line(index, float(index)) for index in range(8)]
    seeds = [SamplingConfig(shuffle_advantages=True, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (plan(*group, sampling=sampling).advantages for sampling in seeds)
    plain = plan(*group).advantages
    assert first == again
    assert sorted(first.values()) == sorted(other.values()) == sorted(plain.values())
    assert len({tuple(dealt.values()) for dealt in (first, other, plain)}) == 3


def test_an_execution_at_the_mean_of_its_group_is_not_trained_but_counts() -> None:
    planned = plan(line(0, 0.0), line(1, 0.5), line(2, 1.0))
    assert [trajectory.execution for trajectory in by_execution(planned)] == ["g000000.00", "g000000.02"]
    assert planned.executions == 3
    assert planned.ledger.excluded_tokens == {"zero_advantage": 2}


@pytest.mark.parametrize(
    ("max_staleness", "trained"), [(0, [3]), (1, [2, 3]), (3, [0, 2, 3]), (None, [0, 2, 3])]
)
def test_stale_calls_are_context(max_staleness: int | None, trained: list[int]) -> None:
    """Step 3 trains under version 3."""
    calls = [
        record("a", out=[10], execution="g000000.00", version=0),
        record("b", "a", out=[12], execution="g000000.00", version=2),
        record("c", "b", out=[13], execution="g000000.00", version=3),
    ]
    sampling = SamplingConfig(max_staleness=max_staleness)
    planned = plan(scored(0, 1.0, *calls), scored(1, 0.0), sampling=sampling)
    (found,) = trajectories(planned)
    mask = np.frombuffer(found.trainable, np.bool_)
    assert np.frombuffer(found.versions, "<i4")[mask].tolist() == trained
    assert found.weight == 1.0
    assert planned.ledger.excluded_tokens == ({"stale": 3 - len(trained)} if len(trained) < 3 else {})


def test_an_execution_that_is_stale_altogether_has_no_trajectory_and_counts() -> None:
    planned = plan(line(0, 1.0), line(1, 0.0), sampling=SamplingConfig(max_staleness=2))
    assert [trajectory.execution for trajectory in trajectories(planned)] == ["g000000.01"]
    assert planned.executions == 2
    assert planned.ledger.excluded_tokens == {"stale": 2}


@settings(max_examples=50)
@given(groups(), st.integers(1, 60), st.integers(1, 4), st.randoms())
def test_packing_invariants_on_random_groups(
    group: list[ScoredExecution], limit: int, bound: int, random: std_random.Random
) -> None:
    sampling = SamplingConfig(max_trajectories=bound)
    planned = plan(*group, sampling=sampling, micro_step_tokens=limit)
    for micro_step in planned.micro_steps:
        assert len(micro_step.trajectories) == 1 or micro_step.length_tokens <= limit
    packed = trajectories(planned)
    assert len({(trajectory.execution, trajectory.leaf) for trajectory in packed}) == len(packed)
    for execution in group:
        own = [trajectory for trajectory in packed if trajectory.execution == execution.execution]
        assert len(own) <= bound
        if planned.advantages[execution.execution] and execution.tree.sampled_tokens:
            assert sum(trajectory.weight for trajectory in own) == pytest.approx(1)
        else:
            assert own == []
    random.shuffle(group)
    assert plan(*group, sampling=sampling, micro_step_tokens=limit) == planned
