"""The gradient of a group's loss by the formula alone: float64, one trajectory at a time, no padding."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gyre.loss import LossConfig, Trajectory


def read(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


def loss_by_formula(
    model: PreTrainedModel, trajectories: list[Trajectory], loss: LossConfig, temperature: float
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for trajectory in trajectories:
        ids = read(trajectory.token_ids, torch.int32).long()
        trained = read(trajectory.trainable, torch.uint8)[1:].bool()
        if not trained.any():
            continue
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        logprobs = torch.log_softmax(logits / temperature, -1).gather(-1, ids[1:, None]).squeeze(-1)
        old = read(trajectory.old_logprobs, torch.float32)[1:].double()
        ratio = (logprobs - old)[trained].mean().exp()
        bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        objective = torch.minimum(ratio * trajectory.advantage, bounded * trajectory.advantage)
        total = total - trajectory.weight * objective
    return total


def gradients_by_formula(
    model: PreTrainedModel, trajectories: list[Trajectory], loss: LossConfig, temperature: float
) -> list[Tensor]:
    """Of every parameter, in the model's order. `model` becomes float64."""
    model.double().zero_grad()
    loss_by_formula(model, trajectories, loss, temperature).backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def assert_same_gradients(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    """Each tensor to `tolerance` of the largest entry of any: small entries of float32 sums are noise."""
    largest = max(float(gradient.abs().max()) for gradient in expected if gradient.numel())
    assert largest > 0.0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0.0, atol=tolerance * largest)
