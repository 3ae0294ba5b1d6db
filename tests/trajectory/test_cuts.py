from __future__ import annotations

import random as std_random
from itertools import combinations, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.loss.microstep import Trajectory
from gyre.trajectory.cuts import EVEN_LOSS, Piece, measure, pack, span_tokens


def trajectory(index: int, ids: list[int]) -> Trajectory:
    count = len(ids)
    return Trajectory(
        execution=f"x{index:03d}",
        leaf=0,
        role="main",
        token_ids=np.array(ids, "<i4").tobytes(),
        trainable=bytes(count),
        old_logprobs=bytes(4 * count),
        versions=bytes(4 * count),
        advantage=0.0,
        weight=1.0,
    )


def row_tokens(piece: Piece) -> int:
    return sum(one.length_tokens for one in piece.trajectories)


def trie_tokens(trajectories: tuple[Trajectory, ...]) -> int:
    """Tokens of the prefix tree, by its definition."""
    paths = [np.frombuffer(t.token_ids, "<i4").tolist() for t in trajectories]
    return len({tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)})


# Few ids, so that prefixes are shared; beyond a byte, where the order of bytes is not that of numbers.
paths = st.lists(st.sampled_from([0, 1, 256, 70_000]), min_size=1, max_size=8)
groups_of_paths = st.lists(paths, max_size=14).map(
    lambda found: [trajectory(index, ids) for index, ids in enumerate(found)]
)


@given(groups_of_paths, st.integers(1, 30), st.randoms())
def test_pieces_cover_each_trajectory_once_whatever_the_order(
    trajectories: list[Trajectory], limit: int, random: std_random.Random
) -> None:
    pieces = pack(trajectories, limit)
    packed = [one for piece in pieces for one in piece.trajectories]
    assert sorted(one.execution for one in packed) == [one.execution for one in trajectories]
    random.shuffle(trajectories)
    assert pack(trajectories, limit) == pieces


@given(groups_of_paths, st.integers(1, 30))
def test_a_piece_keeps_the_limit_and_counts_a_shared_prefix_of_its_tree_once(
    trajectories: list[Trajectory], limit: int
) -> None:
    pieces = pack(trajectories, limit)
    sizes = [row_tokens(piece) for piece in pieces]
    assert sizes == sorted(sizes, reverse=True)
    for piece in pieces:
        assert piece.tree_tokens == trie_tokens(piece.trajectories)
        assert row_tokens(piece) <= limit or len(piece.trajectories) == 1


@given(groups_of_paths, st.integers(1, 30))
def test_a_batch_keeps_the_limit_when_its_rows_are_padded(trajectories: list[Trajectory], limit: int) -> None:
    for piece in pack(trajectories, limit):
        lengths = [one.length_tokens for one in piece.trajectories]
        assert sorted(at for batch in piece.batches for at in batch) == list(range(len(lengths)))
        for batch in piece.batches:
            assert len(batch) == 1 or len(batch) * max(lengths[at] for at in batch) <= limit


@settings(max_examples=50)
@given(st.lists(paths, min_size=1, max_size=8), st.integers(1, 30))
def test_no_other_intervals_cost_notably_less(found: list[list[int]], limit: int) -> None:
    trajectories = [trajectory(index, ids) for index, ids in enumerate(found)]
    leaves = measure(sorted(trajectories, key=lambda t: (t.token_ids, t.execution)))
    count = len(found)
    lengths, costs = leaves.lengths, []
    for cuts in (c for size in range(count) for c in combinations(range(1, count), size)):
        bounds = [0, *cuts, count]
        spans = list(pairwise(bounds))
        if all(b == a + 1 or lengths[a:b].sum() <= limit for a, b in spans):
            costs.append(sum(span_tokens(leaves, *span) for span in spans))
    saved = int(leaves.lengths.sum()) - leaves.tree_tokens
    cost = sum(piece.tree_tokens for piece in pack(trajectories, limit))
    assert min(costs) <= cost <= min(costs) + EVEN_LOSS * saved


def test_cuts_are_where_little_is_shared() -> None:
    """Two trunks of 6, each with three tails of 2: between the trunks nothing is lost."""
    trajectories = [
        trajectory(index, [trunk] * 6 + [index, 9]) for index, trunk in enumerate([1, 2, 1, 2, 1, 2])
    ]
    pieces = pack(trajectories, 24)
    assert [[one.execution for one in piece.trajectories] for piece in pieces] == [
        ["x000", "x002", "x004"],
        ["x001", "x003", "x005"],
    ]
    assert [piece.tree_tokens for piece in pieces] == [12, 12]


def test_no_piece_is_a_small_rest_where_even_ones_lose_as_little() -> None:
    pieces = pack([trajectory(index, [index] * 10) for index in range(10)], 60)
    assert [piece.tree_tokens for piece in pieces] == [50, 50]


def test_rows_of_a_batch_are_of_similar_length() -> None:
    trajectories = [trajectory(index, [7] * length) for index, length in enumerate([5, 9, 8, 3, 10, 3])]
    (piece,) = pack(trajectories, 40)
    lengths = [one.length_tokens for one in piece.trajectories]
    assert [[lengths[at] for at in batch] for batch in piece.batches] == [[10, 9, 8, 5], [3, 3]]


def test_of_none_there_is_no_piece() -> None:
    assert pack([], 10) == []
