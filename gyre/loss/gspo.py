"""GSPO, Group Sequence Policy Optimization (arXiv 2507.18071)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GspoLoss(NamedTuple):
    """`loss`: scalar, the sum over trajectories, to be scaled once a step by 1 / executions.
    `ratios`: float32[N], the sequence-level importance ratios. `clipped`: bool[N]."""

    loss: Tensor
    ratios: Tensor
    clipped: Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and the entropy at its position, under softmax(logits / temperature).

    `logits` [..., V] of any float type, `token_ids` int64[...]; returns float32[...] twice, the entropy
    without gradient. A temperature of 0 (greedy sampling) is taken as 1, as the engines record it.
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1), entropy


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    trainable: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> GspoLoss:
    """The loss of N trajectories padded to T tokens.

    s_i = exp(mean over trainable t of (logprobs_it - old_logprobs_it)),
    loss = -sum_i weights_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i).

    `logprobs`, `old_logprobs` float32[N, T]; `trainable` bool[N, T]; `advantages`, `weights` float32[N].
    Masked tokens touch neither value nor gradient; a trajectory without trainable tokens counts nothing.
    """
    counts = trainable.sum(-1)
    drift = torch.where(trainable, logprobs - old_logprobs, 0.0).sum(-1) / counts.clamp(min=1)
    ratios = drift.exp()
    bounded = ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective = torch.minimum(ratios * advantages, bounded * advantages)
    counted = counts > 0
    loss = -torch.where(counted, weights * objective, 0.0).sum()
    clipped = counted & (bounded * advantages < ratios * advantages)
    return GspoLoss(loss, ratios.detach(), clipped)
