from __future__ import annotations

import pytest

from benchmarks.timing import FULL, QUICK, Segment, rates


async def test_the_best_round_counts() -> None:
    seconds = iter([4.0, 2.0, 8.0])

    async def run(count: int) -> float:
        return next(seconds)

    assert await rates([Segment("a", 10, run)], 3) == {"a": 5.0}


async def test_segments_take_turns() -> None:
    ran: list[str] = []

    async def run(name: str) -> None:
        ran.append(name)

    await rates([Segment(name, 1, lambda _, name=name: run(name)) for name in "ab"], 2)
    assert ran == ["a", "b", "a", "b"]


async def test_a_segment_without_seconds_of_its_own_is_timed() -> None:
    async def run(count: int) -> None:
        sum(range(100_000))

    assert 0 < (await rates([Segment("a", 1, run)], 1))["a"] < 1e6


@pytest.mark.parametrize(("effort", "count"), [(FULL, 6400), (QUICK, 128)])
def test_an_effort_scales_a_segment(effort: object, count: int) -> None:
    assert effort.count(6400) == count  # type: ignore[attr-defined]
