"""GSPO, against the formula written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gyre.loss.gspo import GspoLoss, gspo_loss, token_logprobs

Row = list[tuple[float, float, bool]]
"""(logprob, old logprob, trainable) per token."""


def tensors(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(len(row) for row in rows)
    padded = [row + [(0.0, 0.0, False)] * (longest - len(row)) for row in rows]
    new, old, trainable = (
        torch.tensor([[token[i] for token in row] for row in padded], dtype=kind)
        for i, kind in enumerate((torch.float64, torch.float64, torch.bool))
    )
    return new.requires_grad_(), old, trainable


def loss_of(
    rows: list[Row], advantages: list[float], weights: list[float], low: float = 0.2, high: float = 0.3
) -> tuple[GspoLoss, Tensor]:
    """The loss and its gradient by the new log-probabilities."""
    new, old, trainable = tensors(rows)
    result = gspo_loss(
        new,
        old,
        trainable,
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(weights, dtype=torch.float64),
        clip_low=low,
        clip_high=high,
    )
    (gradient,) = torch.autograd.grad(result.loss, new)
    return result, gradient


def by_hand(row: Row, advantage: float, weight: float, low: float = 0.2, high: float = 0.3) -> float:
    drifts = [new - old for new, old, trainable in row if trainable]
    if not drifts:
        return 0.0
    ratio = math.exp(sum(drifts) / len(drifts))
    bounded = min(max(ratio, 1.0 - low), 1.0 + high)
    return -weight * min(ratio * advantage, bounded * advantage)


def row(drift: float, count: int = 2) -> Row:
    """Trainable tokens, each moved by `drift` since it was sampled, behind one that was not."""
    return [(-3.0, 0.0, False)] + [(-1.0 + drift, -1.0, True)] * count


def test_the_loss_is_the_formula() -> None:
    rows: list[Row] = [
        [(-1.0, -1.1, True), (-2.0, -1.8, True), (-9.0, 0.0, False), (-0.5, -0.6, True)],
        [(-0.7, -0.5, True)],
    ]
    result, _ = loss_of(rows, [1.5, -0.5], [0.25, 1.0])
    assert result.loss.item() == pytest.approx(by_hand(rows[0], 1.5, 0.25) + by_hand(rows[1], -0.5, 1.0))
    assert result.ratios.tolist() == pytest.approx([1.0, math.exp(-0.2)])
    assert result.clipped.tolist() == [False, False]


@pytest.mark.parametrize(
    ("drift", "advantage", "ratio", "clipped"),
    [
        (0.5, 1.0, 1.3, True),  # too much of what was good
        (-0.5, -1.0, 0.8, True),  # too little of what was bad
        (0.5, -1.0, math.exp(0.5), False),  # more of what was bad: there is no limit to going back
        (-0.5, 1.0, math.exp(-0.5), False),
        (0.1, 1.0, math.exp(0.1), False),
        (-0.1, -1.0, math.exp(-0.1), False),
    ],
)
def test_the_ratio_is_clipped_where_that_lowers_the_objective(
    drift: float, advantage: float, ratio: float, clipped: bool
) -> None:
    result, gradient = loss_of([row(drift)], [advantage], [1.0])
    assert result.loss.item() == pytest.approx(-ratio * advantage)
    assert result.clipped.tolist() == [clipped]
    assert gradient.any().item() is not clipped


def test_on_policy_its_gradient_is_that_of_reinforce_with_the_mean_of_a_sequence() -> None:
    rows: list[Row] = [row(0.0, 3), row(0.0, 1)]
    _, gradient = loss_of(rows, [2.0, -1.0], [0.5, 1.0])
    new, _, trainable = tensors(rows)
    counts = trainable.sum(-1)
    means = torch.where(trainable, new, 0.0).sum(-1) / counts
    reinforce = -(torch.tensor([2.0 * 0.5, -1.0], dtype=torch.float64) * means).sum()
    (expected,) = torch.autograd.grad(reinforce, new)
    assert torch.allclose(gradient, expected)


def test_masked_tokens_touch_neither_value_nor_gradient() -> None:
    plain = [row(0.1, 3)]
    odd: list[Row] = [[(-99.0, math.inf, False), *plain[0][1:], (math.nan, -2.0, False)]]
    expected, _ = loss_of(plain, [1.0], [1.0])
    result, gradient = loss_of(odd, [1.0], [1.0])
    assert result.loss.item() == pytest.approx(expected.loss.item())
    assert gradient[0, 0] == gradient[0, -1] == 0.0
    assert bool((gradient[0, 1:-1] != 0.0).all())


def test_a_trajectory_without_trainable_tokens_counts_nothing() -> None:
    silent: Row = [(-1.0, -5.0, False)] * 3
    alone, gradient = loss_of([silent], [7.0], [1.0])
    assert alone.loss.item() == 0.0 and not gradient.any()
    assert (alone.ratios.tolist(), alone.clipped.tolist()) == ([1.0], [False])
    beside, _ = loss_of([silent, row(0.1)], [7.0, 1.0], [1.0, 1.0])
    assert beside.loss.item() == pytest.approx(by_hand(row(0.1), 1.0, 1.0))


def test_an_execution_that_branches_more_weighs_no_more() -> None:
    """Two-level mean: its trajectories share its tokens, so that the weights of an execution sum to 1."""
    whole, gradient = loss_of([row(0.0, 4)], [1.0], [1.0])
    branched, parts = loss_of([row(0.0, 1), row(0.0, 3)], [1.0, 1.0], [0.25, 0.75])
    assert branched.loss.item() == pytest.approx(whole.loss.item())
    trained = gradient[gradient != 0.0]
    assert torch.allclose(parts[parts != 0.0], trained)


logprob = st.floats(-5.0, 0.0)
token = st.tuples(logprob, logprob, st.booleans())
trajectory = st.tuples(st.lists(token, min_size=1, max_size=6), st.floats(-3.0, 3.0), st.floats(0.0, 1.0))
clip = st.floats(1e-4, 0.9)


@settings(max_examples=100, deadline=None)
@given(st.lists(trajectory, min_size=1, max_size=4), clip, clip)
def test_it_is_the_formula_for_any_batch(
    trajectories: list[tuple[Row, float, float]], low: float, high: float
) -> None:
    rows, advantages, weights = (list(column) for column in zip(*trajectories, strict=True))
    result, gradient = loss_of(rows, advantages, weights, low, high)
    expected = sum(by_hand(*trajectory, low, high) for trajectory in trajectories)
    assert result.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    _, _, trainable = tensors(rows)
    assert bool(gradient.isfinite().all()) and not gradient[~trainable].any()
    # It adds: the gradient of a batch does not depend on how it was cut.
    cut = sum(loss_of([r], [a], [w], low, high)[0].loss.item() for r, a, w in trajectories)
    assert result.loss.item() == pytest.approx(cut, rel=1e-9, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-20.0, 20.0), min_size=2, max_size=8), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.data()
)
def test_log_probabilities_are_those_of_the_softmax(
    logits: list[float], temperature: float, data: Any
) -> None:
    chosen = data.draw(st.integers(0, len(logits) - 1))
    logprobs, entropy = token_logprobs(
        torch.tensor([logits], dtype=torch.float64), torch.tensor([chosen]), temperature
    )
    scaled = [logit / (temperature or 1.0) for logit in logits]
    top = max(scaled)
    total = sum(math.exp(logit - top) for logit in scaled)
    expected = [logit - top - math.log(total) for logit in scaled]
    assert logprobs.item() == pytest.approx(expected[chosen], rel=1e-4, abs=1e-4)
    assert entropy.item() == pytest.approx(-sum(math.exp(p) * p for p in expected), rel=1e-3, abs=1e-4)
    assert not entropy.requires_grad


def test_log_probabilities_of_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(logits, torch.tensor([2]), 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logprobs.item() == pytest.approx(torch.log_softmax(logits.float(), -1)[0, 2].item())
