"""A micro-step as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gyre.loss import Trajectory


class Batch(NamedTuple):
    """N trajectories padded on the right to T tokens: `token_ids` int64[N, T], `trainable` bool[N, T],
    `old_logprobs` float32[N, T], `advantages` and `weights` float32[N]."""

    token_ids: Tensor
    trainable: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor


def collate(trajectories: list[Trajectory], device: torch.device) -> Batch:
    """An empty list gives one row of one token that counts nothing: ranks of a sharded cell all run."""
    count = max(len(trajectories), 1)
    longest = max((t.length_tokens for t in trajectories), default=1)
    token_ids = torch.zeros(count, longest, dtype=torch.int64)
    trainable = torch.zeros(count, longest, dtype=torch.bool)
    old_logprobs = torch.zeros(count, longest, dtype=torch.float32)
    advantages = torch.zeros(count)
    weights = torch.zeros(count)
    for row, trajectory in enumerate(trajectories):
        length = trajectory.length_tokens
        token_ids[row, :length] = _read(trajectory.token_ids, torch.int32)
        trainable[row, :length] = _read(trajectory.trainable, torch.uint8).bool()
        old_logprobs[row, :length] = _read(trajectory.old_logprobs, torch.float32)
        advantages[row] = trajectory.advantage
        weights[row] = trajectory.weight
    return Batch(*(t.to(device) for t in (token_ids, trainable, old_logprobs, advantages, weights)))


def _read(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)
