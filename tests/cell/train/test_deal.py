from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gyre.cell.train.deal import deal
from gyre.loss import MicroStep, Trajectory
from gyre.trajectory.cuts import pack
from tests.cell.parts import micro_step, trajectory


def padded(rows: list[Trajectory]) -> int:
    return len(rows) * max((row.length_tokens for row in rows), default=0)


def packed(lengths: list[int], limit: int, ranks: int) -> list[MicroStep]:
    rows = [trajectory(seed, tokens=length) for seed, length in enumerate(lengths)]
    return [
        msgspec.structs.replace(micro_step(*piece.trajectories), batches=piece.batches)
        for piece in pack(rows, limit, ranks)
    ]


def dealt(lengths: list[int], limit: int, ranks: int) -> list[list[list[list[int]]]]:
    """Of each micro-step, each time, each rank: the lengths of its rows."""
    return [
        [[[row.length_tokens for row in rows] for rows in parts] for parts in deal(its, ranks)]
        for its in packed(lengths, limit, ranks)
    ]


def test_long_rows_are_dealt_to_all_ranks() -> None:
    assert dealt([4100] * 8, 8192, 2) == [
        [[[4100], [4100]], [[4100], []]],
        [[[4100], [4100]], [[4100], []]],
        [[[4100], [4100]]],
    ]
    assert dealt([8000] * 4, 8192, 4) == [[[[8000]] * 4]]


def test_few_short_rows_are_dealt_by_length() -> None:
    assert dealt([3, 10, 3, 9, 3, 3], 40, 2) == [[[[10, 9], [3, 3, 3, 3]]]]


def test_of_no_rows_each_rank_has_none() -> None:
    assert deal(micro_step(), 2) == [[[], []]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=14), st.integers(20, 60), st.integers(1, 4))
def test_no_rank_idles_while_another_has_several(lengths: list[int], limit: int, ranks: int) -> None:
    for its in packed(lengths, limit, ranks):
        assert its.length_tokens <= limit * ranks
        times = deal(its, ranks)
        assert len(times) == -(-len(its.batched) // ranks)
        found = [row.execution for parts in times for rows in parts for row in rows]
        assert Counter(found) == Counter(row.execution for row in its.trajectories)
        for at, parts in enumerate(times):
            together = its.batched[at * ranks : (at + 1) * ranks]
            assert len(parts) == ranks
            assert max(map(padded, parts)) <= max(padded(list(batch)) for batch in together) <= limit
            counts = [len(rows) for rows in parts]
            assert min(counts) > 0 or max(counts) == 1
