from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cell.engine import kv_bytes

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def pool(dtype: torch.dtype, head_dim: int = 3) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(12, 2, 2, 5, 1, head_dim).to(dtype)


@settings(deadline=None)
@given(DTYPES, st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True), st.integers(1, 3))
def test_sums_are_those_of_each_block(dtype: torch.dtype, blocks: list[int], cached: int) -> None:
    data = pool(dtype)
    found = kv_bytes.sums(data, blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_bytes, "CACHED_BYTES", cached * data[0].nbytes)
        assert kv_bytes.finite_sums(data, blocks) == found
    assert found == b"".join(kv_bytes.sums(data, [block]) for block in blocks)
    data[blocks[-1], 1, 0, 4, 0, 2] += 1
    changed = kv_bytes.sums(data, blocks)
    assert (changed[:-8], changed[-8:] != found[-8:]) == (found[:-8], True)


@settings(deadline=None)
@given(DTYPES, st.sampled_from([float("nan"), float("inf"), -float("inf")]), st.booleans())
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, number: float, both: bool) -> None:
    data = pool(dtype)
    data[5, 1, 1, 3, 0, 1] = number
    if both:
        data[5, 0, 1, 3, 0, 1] = -number
    assert kv_bytes.finite_sums(data, [0, 1, 2, 4, 5, 6]) is None
    assert kv_bytes.finite_sums(data, [0, 1, 2, 4, 6]) is not None


@given(DTYPES)
def test_finite_numbers_whose_sum_is_not_are_finite(dtype: torch.dtype) -> None:
    data = pool(dtype)
    data[3] = torch.finfo(dtype).max
    assert kv_bytes.finite_sums(data, [2, 3]) == kv_bytes.sums(data, [2, 3])
