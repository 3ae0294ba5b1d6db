"""A micro-step as tensors."""

from __future__ import annotations

import struct

import pytest
import torch

from gyre.cell.train.batch import Batch, collate
from gyre.loss import Trajectory

CPU = torch.device("cpu")


def trajectory(ids: list[int], trainable: list[int], old: list[float], advantage: float = 1.0) -> Trajectory:
    return Trajectory(
        execution="g000000.00",
        leaf=0,
        role="main",
        token_ids=struct.pack(f"<{len(ids)}i", *ids),
        trainable=bytes(trainable),
        old_logprobs=struct.pack(f"<{len(old)}f", *old),
        versions=struct.pack(f"<{len(ids)}i", *[-1] * len(ids)),
        advantage=advantage,
        weight=0.25,
    )


def test_trajectories_are_padded_on_the_right() -> None:
    batch = collate(
        [
            trajectory([5, 70000, 7], [0, 1, 1], [0.0, -0.5, -1.5], advantage=2.0),
            trajectory([9], [0], [0.0], advantage=-1.0),
        ],
        CPU,
    )
    assert batch.token_ids.tolist() == [[5, 70000, 7], [9, 0, 0]]
    assert batch.trainable.tolist() == [[False, True, True], [False, False, False]]
    assert batch.old_logprobs.tolist() == [[0.0, -0.5, -1.5], [0.0, 0.0, 0.0]]
    assert batch.advantages.tolist() == [2.0, -1.0]
    assert batch.weights.tolist() == [0.25, 0.25]


def test_dtypes_are_those_that_the_loss_takes() -> None:
    batch = collate([trajectory([5], [1], [0.0])], CPU)
    assert [t.dtype for t in batch] == [
        torch.int64,
        torch.bool,
        torch.float32,
        torch.float32,
        torch.float32,
    ]


def test_a_rank_without_trajectories_gets_a_row_that_counts_nothing() -> None:
    batch = collate([], CPU)
    assert batch.token_ids.shape == (1, 1)
    assert not batch.trainable.any() and not batch.weights.any()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_batch_has_a_row_for_each(count: int) -> None:
    batch: Batch = collate([trajectory([1, 2], [0, 1], [0.0, -1.0])] * count, CPU)
    assert {t.shape[0] for t in batch} == {max(count, 1)}
