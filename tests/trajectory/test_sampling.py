from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectory.config import DrawRule
from gyre.trajectory.records import CallRecord
from gyre.trajectory.roles import Roles, classify
from gyre.trajectory.sampling import PRIORITY, Draw, draw, generator, trainable
from gyre.trajectory.tree import TrajectoryTree
from tests.trajectory.trees import calls_tool, random_records, record, says, tree_of, user

# The 0.9999 quantile of chi-square by degrees of freedom.
CHI_SQUARE_9999 = {2: 18.42, 3: 21.11, 5: 25.74}


def forked() -> tuple[TrajectoryTree, Roles]:
    """A trunk of 4 sampled tokens with three branches of 1, 2 and 5: paths of 5, 6 and 9."""
    tree = tree_of(
        record("trunk", out=[1] * 4),
        record("b", "trunk", out=[1]),
        record("c", "trunk", out=[1] * 2),
        record("d", "trunk", out=[1] * 5),
    )
    return tree, classify(tree)


def chi_square(observed: dict[object, int], expected: dict[object, float]) -> float:
    assert observed.keys() <= expected.keys()
    return sum((observed.get(key, 0) - count) ** 2 / count for key, count in expected.items())


def draws_of(tree: TrajectoryTree, roles: Roles, bound: int, times: int) -> list[tuple[int, ...]]:
    """Each under a seed of its own, as executions are drawn from."""
    streams = (generator(seed, tree.execution) for seed in range(times))
    return [tuple(drawn.leaf for drawn in draw(tree, roles, bound, random)) for random in streams]


def test_the_first_draw_is_proportional_to_unmasked_tokens() -> None:
    tree, roles = forked()
    times = 10_000
    observed = Counter(leaves[0] for leaves in draws_of(tree, roles, 1, times))
    expected = {leaf: times * tokens / 20 for leaf, tokens in {1: 5, 2: 6, 3: 9}.items()}
    assert chi_square(dict(observed), dict(expected)) < CHI_SQUARE_9999[2]


def test_later_draws_are_proportional_to_what_is_still_unmasked() -> None:
    tree, roles = forked()
    times = 10_000
    own = {1: 1, 2: 2, 3: 5}
    expected: dict[object, float] = {}
    for first, tokens in {1: 5, 2: 6, 3: 9}.items():
        rest = {leaf: count for leaf, count in own.items() if leaf != first}
        for second, count in rest.items():
            expected[(first, second)] = times * tokens / 20 * count / sum(rest.values())
    observed = Counter(draws_of(tree, roles, 2, times))
    assert chi_square(dict(observed), expected) < CHI_SQUARE_9999[5]


def test_classes_are_drawn_from_in_order_and_in_proportion_inside_each() -> None:
    """Two leaves of the main agent (3 and 1 tokens), its summary (2), two of a sub-agent (1 and 2)."""
    spawn = calls_tool("spawn", prompt="do the whole of it")
    tree = tree_of(
        record("m1", out=[1] * 3, messages=[user("go")], output=spawn),
        record(
            "s", out=[1] * 2, messages=[user("sum up")], output=says("half of it is done"), has_tools=False
        ),
        record("m2", out=[1], messages=[user("So far: half of it is done")]),
        record("a1", out=[1], messages=[user("do the whole of it")]),
        record("a2", out=[1] * 2, messages=[user("do the whole of it")]),
    )
    roles = classify(tree)
    assert roles.of_node == ("main", "main_summary", "main", "sub_agent", "sub_agent")
    times = 10_000
    expected: dict[object, float] = {
        (first, 2 - first, 1, third): times * of_main / 4 * of_sub_agent / 3
        for first, of_main in {0: 3, 2: 1}.items()
        for third, of_sub_agent in {3: 1, 4: 2}.items()
    }
    observed = Counter(draws_of(tree, roles, 4, times))
    assert chi_square(dict(observed), expected) < CHI_SQUARE_9999[3]


def by_coverage(tree: TrajectoryTree, bound: int = 9) -> list[Draw]:
    return draw(tree, classify(tree), bound, np.random.default_rng(0), rule="coverage")


def test_coverage_takes_what_adds_most_then_what_is_cheaper_then_what_is_earlier() -> None:
    tree = tree_of(
        record("trunk", out=[1] * 4),
        record("cheap", "trunk", new=[1], out=[1] * 3),
        record("dear", "trunk", new=[1] * 9, out=[1] * 3),
        record("as cheap", "trunk", new=[2], out=[1] * 3),
        record("most", "trunk", new=[1] * 9, out=[1] * 5),
    )
    assert [drawn.leaf for drawn in by_coverage(tree)] == [4, 1, 3, 2]
    assert [drawn.leaf for drawn in by_coverage(tree, bound=2)] == [4, 1]


@pytest.mark.parametrize(("tokens", "order"), [(24, [0, 1]), (25, [1, 0])])
def test_coverage_skips_a_class_below_a_quarter_of_the_best(tokens: int, order: list[int]) -> None:
    """The main agent's leaf adds 6 tokens: a quarter of 24, less than that of 25."""
    main = record(
        "m", out=[1] * 6, messages=[user("go")], output=calls_tool("spawn", prompt="do the whole of it")
    )
    tree = tree_of(main, record("s", out=[1] * tokens, messages=[user("do the whole of it")]))
    assert [drawn.leaf for drawn in by_coverage(tree)] == order


@settings(max_examples=50)
@given(random_records(), st.integers(1, 6))
def test_coverage_takes_the_most_of_the_first_class_that_is_worth_it(
    records: list[CallRecord], bound: int
) -> None:
    tree = tree_of(*records)
    roles = classify(tree)
    masked: set[int] = set()
    draws = by_coverage(tree, bound)
    for drawn in draws:
        adds = {
            leaf.index: sum(node.sampled_tokens for node in tree.path(leaf) if node.index not in masked)
            for leaf in tree.leaves()
        }
        best = {role: 0 for role in PRIORITY}
        for leaf, tokens in adds.items():
            best[roles.of_node[leaf]] = max(best[roles.of_node[leaf]], tokens)
        assert drawn.role == next(role for role in PRIORITY if best[role] >= 0.25 * max(best.values()))
        trained = sum(tree.nodes[index].sampled_tokens for index in drawn.trains)
        assert adds[drawn.leaf] == best[drawn.role] == trained > 0
        masked |= {node.index for node in tree.path(tree.nodes[drawn.leaf])}
    if len(draws) < bound:
        assert masked >= {node.index for node in tree.nodes if node.sampled_tokens}


@settings(max_examples=50)
@given(random_records(), st.integers(0, 3))
def test_all_draws_every_leaf_that_adds_something_whatever_the_seed(
    records: list[CallRecord], seed: int
) -> None:
    tree = tree_of(*records)
    draws = draw(tree, classify(tree), 1, generator(seed, tree.execution), rule="all")
    keys = [(PRIORITY.index(drawn.role), drawn.leaf) for drawn in draws]
    assert keys == sorted(set(keys))
    assert {leaf.index for leaf in tree.leaves() if leaf.sampled_tokens} <= {drawn.leaf for drawn in draws}
    assert all(drawn.trains for drawn in draws)
    trained = [index for drawn in draws for index in drawn.trains]
    assert sorted(trained) == [node.index for node in tree.nodes if node.sampled_tokens]


@settings(max_examples=50)
@given(random_records(), st.sampled_from(["paper", "coverage", "all"]), st.data())
def test_what_is_barred_is_trained_by_none(
    records: list[CallRecord], rule: DrawRule, data: st.DataObject
) -> None:
    tree = tree_of(*records)
    barred = data.draw(st.sets(st.sampled_from(range(len(records)))))
    draws = draw(tree, classify(tree), 99, np.random.default_rng(0), rule=rule, barred=barred)
    trained = [index for drawn in draws for index in drawn.trains]
    wanted = [node.index for node in tree.nodes if node.sampled_tokens and node.index not in barred]
    assert sorted(trained) == wanted


def test_a_shared_prefix_is_trained_by_the_first_draw_only() -> None:
    tree, roles = forked()
    first, *rest = draw(tree, roles, 5, np.random.default_rng(0))
    assert 0 in first.trains
    assert all(0 not in drawn.trains for drawn in rest)
    masks = [trainable(tree.path(tree.nodes[drawn.leaf]), drawn) for drawn in [first, *rest]]
    assert [int(mask[2:6].sum()) for mask in masks] == [4, 0, 0]


def test_leaves_without_trainable_tokens_are_never_drawn() -> None:
    tree = tree_of(record("a", out=[1]), record("b", "a", out=[]), record("c", "a", out=[]))
    assert len(draw(tree, classify(tree), 5, np.random.default_rng(0))) == 1


def test_an_empty_tree_yields_nothing() -> None:
    tree = TrajectoryTree("g000000.00")
    assert draw(tree, classify(tree), 5, np.random.default_rng(0)) == []


def test_the_stream_of_an_execution_depends_on_seed_and_id_alone() -> None:
    def numbers(seed: int, execution: str) -> list[int]:
        return generator(seed, execution).integers(1 << 60, size=4).tolist()

    assert numbers(0, "g000000.00") == numbers(0, "g000000.00")
    assert numbers(0, "g000000.00") != numbers(0, "g000000.01")
    assert numbers(0, "g000000.00") != numbers(1, "g000000.00")
    assert numbers(-1, "g000000.00") != numbers(1, "g000000.00")


def unmasked_by_role(tree: TrajectoryTree, roles: Roles, masked: set[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for leaf in tree.leaves():
        tokens = sum(node.sampled_tokens for node in tree.path(leaf) if node.index not in masked)
        found[roles.of_node[leaf.index]] = found.get(roles.of_node[leaf.index], 0) + tokens
    return found


@given(random_records(), st.integers(1, 6), st.integers(0, 3))
def test_bound_priority_and_masking_hold_on_random_trees(
    records: list[CallRecord], bound: int, seed: int
) -> None:
    tree = tree_of(*records)
    roles = classify(tree)
    draws = draw(tree, roles, bound, generator(seed, tree.execution))
    assert len(draws) <= bound
    masked: set[int] = set()
    for drawn in draws:
        unmasked = unmasked_by_role(tree, roles, masked)
        highest = next(role for role in PRIORITY if unmasked.get(role))
        assert drawn.role == roles.of_node[drawn.leaf] == highest
        path = {node.index for node in tree.path(tree.nodes[drawn.leaf])}
        assert drawn.trains == {i for i in path - masked if tree.nodes[i].sampled_tokens}
        assert drawn.trains
        masked |= path
    if len(draws) < bound:
        assert not any(unmasked_by_role(tree, roles, masked).values())


@given(random_records())
def test_each_sampled_token_is_trained_at_most_once_and_nothing_else(records: list[CallRecord]) -> None:
    tree = tree_of(*records)
    draws = draw(tree, classify(tree), len(records), generator(0, tree.execution))
    trained: Counter[tuple[int, int]] = Counter()
    for drawn in draws:
        path = tree.path(tree.nodes[drawn.leaf])
        assert not (trainable(path, drawn) & ~tree.path_tokens(path[-1]).sampled).any()
        trained.update(_positions(path, drawn))
    assert set(trained.values()) <= {1}
    # With room for every leaf, every sampled token is trained.
    assert len(trained) == tree.sampled_tokens


def _positions(path: list, drawn: Draw) -> list[tuple[int, int]]:  # type: ignore[type-arg]
    where = [(node.index, offset) for node in path for offset in range(len(node.tokens.sampled))]
    return [place for place, trains in zip(where, trainable(path, drawn), strict=True) if trains]
