"""The core's update, against plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gyre.cell.config import TrainConfig
from gyre.cell.group import CellGroup
from gyre.cell.train.optimizer import MasterWeights, learning_rate

GROUP = CellGroup(0, 1, torch.device("cpu"), 10.0)
SHAPES = [(7, 3), (5,), (0, 4), (2, 2, 2)]


def tensors(seed: int, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * size for shape in SHAPES]


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0} | changes)


@pytest.mark.parametrize("size", [0.01, 10.0], ids=["within the norm", "clipped"])
def test_it_updates_as_adamw_with_clipping_does(size: float) -> None:
    """Three steps, each the mean over its executions of contributions that came one by one. Adam does not
    see a factor that all steps have, so they have unlike ones."""
    masters = MasterWeights(tensors(0), config())
    plain = [torch.nn.Parameter(tensor.clone()) for tensor in tensors(0)]
    optimizer = torch.optim.AdamW(plain, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, executions in enumerate((6, 2, 12)):
        contributions = [tensors(10 * step + part, size) for part in range(1, 4)]
        for contribution in contributions:
            masters.add(contribution)
        norm, lr = masters.update(step, 1 / executions, GROUP)
        for index, parameter in enumerate(plain):
            parameter.grad = torch.stack([c[index] for c in contributions]).sum(0) / executions
        expected = torch.nn.utils.clip_grad_norm_(plain, 1.0)
        optimizer.step()
        assert (norm, lr) == (pytest.approx(expected.item(), rel=1e-5), 1e-2)
        for ours, theirs in zip(masters.weights, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_the_sum_begins_at_nothing_after_an_update() -> None:
    masters = MasterWeights(tensors(0), config(weight_decay=0.0))
    masters.add(tensors(1))
    masters.update(0, 1.0, GROUP)
    assert not any(total.any() for total in masters.sum)


def test_masters_are_float32_copies() -> None:
    rows = [tensor.bfloat16() for tensor in tensors(0)]
    before = [tensor.clone() for tensor in rows]
    masters = MasterWeights(rows, config())
    masters.add([tensor.bfloat16() for tensor in tensors(1)])
    masters.update(0, 1.0, GROUP)
    assert all(weight.dtype == torch.float32 for weight in masters.weights)
    assert all(torch.equal(row, old) for row, old in zip(rows, before, strict=True))


def test_the_learning_rate_warms_up() -> None:
    masters = MasterWeights(tensors(0), config(warmup_steps=4))
    rates = []
    for step in range(6):
        masters.add(tensors(step))
        rates.append(masters.update(step, 1.0, GROUP)[1])
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_a_linear_schedule_falls_to_nothing_after_the_last_step() -> None:
    falling = config(lr_schedule="linear", steps=4)
    assert [learning_rate(falling, step) for step in range(5)] == pytest.approx(
        [0.01, 0.0075, 0.005, 0.0025, 0.0]
    )


def test_a_norm_that_is_not_finite_keeps_the_weights() -> None:
    masters = MasterWeights(tensors(0), config())
    broken = tensors(1)
    broken[1][2] = math.inf
    masters.add(broken)
    with pytest.raises(FloatingPointError, match="step 4: the gradient norm is inf"):
        masters.update(4, 1.0, GROUP)
    for weight, before in zip(masters.weights, tensors(0), strict=True):
        assert torch.equal(weight, before)


@pytest.mark.parametrize("updates", [0, 2])
def test_it_goes_on_from_its_state_as_if_never_stopped(updates: int) -> None:
    went_on = MasterWeights(tensors(0), config())
    for step in range(updates):
        went_on.add(tensors(step + 1))
        went_on.update(step, 1.0, GROUP)
    resumed = MasterWeights(tensors(99), config())
    resumed.load_state({name: t.clone() for name, t in went_on.state().items()})
    for masters in (went_on, resumed):
        masters.add(tensors(50))
        masters.update(updates, 1.0, GROUP)
    for one, other in zip(went_on.weights, resumed.weights, strict=True):
        assert torch.equal(one, other)


def test_a_state_of_other_rows_is_refused() -> None:
    state = MasterWeights([torch.zeros(1, 3)], config()).state()
    masters = MasterWeights([torch.ones(2, 3)], config())
    with pytest.raises(RuntimeError, match=r"weight 0 is \(1, 3\), not \(2, 3\)"):
        masters.load_state(state)
    assert masters.weights[0].tolist() == [[1.0] * 3] * 2
