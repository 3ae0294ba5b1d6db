from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.trajectory.advantage import STD_FLOOR, advantages, shuffled
from gyre.trajectory.config import AdvantageKind

scores_of_a_group = st.dictionaries(
    st.integers(0, 20).map(lambda index: f"g000000.{index:02d}"), st.floats(0, 1), min_size=2
)


def test_mean_std_gives_unit_variance() -> None:
    relative = advantages({"a": 0.0, "b": 1.0, "c": 1.0, "d": 0.0}, "mean_std")
    assert relative == {"a": -1.0, "b": 1.0, "c": 1.0, "d": -1.0}


def test_mean_keeps_the_scale() -> None:
    assert advantages({"a": 0.0, "b": 0.5}, "mean") == {"a": -0.25, "b": 0.25}


@pytest.mark.parametrize("scores", [[0.0, 0.5], [1.0, 0.0, 0.25, 0.5]])
def test_leave_one_out_is_relative_to_the_mean_of_the_others(scores: list[float]) -> None:
    relative = advantages({str(index): score for index, score in enumerate(scores)}, "leave_one_out")
    others = [(sum(scores) - score) / (len(scores) - 1) for score in scores]
    assert list(relative.values()) == pytest.approx([s - o for s, o in zip(scores, others, strict=True)])


@pytest.mark.parametrize("kind", ["mean_std", "mean", "leave_one_out"])
def test_a_score_at_the_mean_has_an_advantage_of_exactly_zero(kind: AdvantageKind) -> None:
    assert advantages({"a": 0.1, "b": 0.2, "c": 0.3}, kind)["b"] == 0.0


@pytest.mark.parametrize("scores", [[0.1] * 7, [1.0] * 2, [0.0] * 3, [0.1 + 0.2, 0.3]])
def test_equal_scores_have_advantages_of_exactly_zero(scores: list[float]) -> None:
    relative = advantages({str(index): score for index, score in enumerate(scores)}, "mean_std")
    assert set(relative.values()) == {0.0}


def test_a_tiny_difference_is_not_blown_up() -> None:
    relative = advantages({"a": 0.5, "b": 0.5 + STD_FLOOR / 10}, "mean_std")
    assert relative["b"] == pytest.approx(0.05)


def test_a_group_of_none_has_none() -> None:
    assert advantages({}, "mean_std") == {}


@given(scores_of_a_group, st.randoms())
def test_advantages_sum_to_zero_and_ignore_the_order_of_arrival(
    scores: dict[str, float], random: object
) -> None:
    relative = advantages(scores, "mean_std")
    assert math.fsum(relative.values()) == pytest.approx(0, abs=1e-6)
    items = list(scores.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert advantages(dict(items), "mean_std") == relative


@given(scores_of_a_group)
def test_shuffling_deals_out_the_same_advantages(scores: dict[str, float]) -> None:
    relative = advantages(scores, "mean_std")
    dealt = shuffled(relative, np.random.default_rng(1))
    assert dealt.keys() == relative.keys()
    assert sorted(dealt.values()) == sorted(relative.values())


def test_shuffled_advantages_do_not_go_with_the_scores() -> None:
    relative = advantages({str(index): float(index < 2) for index in range(4)}, "mean_std")
    random = np.random.default_rng(0)
    mean_of_the_best = np.mean([shuffled(relative, random)["0"] for _ in range(4000)])
    assert abs(mean_of_the_best) < 0.08  # five standard errors; unshuffled it is 1
