from __future__ import annotations

import random

import pytest
import torch

from gyre.cell.engine import kv_bytes
from gyre.cell.engine.kv_sums import BlockSums


@pytest.mark.parametrize("heads", [2, 3])
def test_they_are_those_of_the_pool(heads: int) -> None:
    """Of words of 8 bytes, and of 4 where a block is no multiple of that."""
    torch.manual_seed(0)
    data = torch.randn((9, 1, 2, 1, heads, 2 if heads == 2 else 1), dtype=torch.bfloat16)
    assert data[0].nbytes % 8 == (0 if heads == 2 else 4)
    blocks = [7, 2, 3, 0]
    memory = memoryview(data.view(-1).view(torch.uint8).numpy())
    sums = BlockSums(memory, data[0].nbytes, blocks)
    for block in random.Random(1).sample(blocks, 4):
        sums.look.at(block * sums.look.nbytes)
    assert sums.taken() == kv_bytes.sums(data, blocks)
