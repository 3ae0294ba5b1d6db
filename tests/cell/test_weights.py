"""Where parameters lie in a region, and which rows of them are a rank's."""

from __future__ import annotations

import zlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from gyre.cell.weights import ALIGN_BYTES, Layout, checksum, fill, parameters, shapes

shape = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
model_shapes = st.lists(shape, min_size=1, max_size=6)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def random_tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@settings(max_examples=200, deadline=None)
@given(model_shapes, dtypes, st.integers(1, 5))
def test_what_ranks_write_in_parts_is_read_whole(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, ranks: int
) -> None:
    """However unevenly the rows divide, ranks without a row of some parameter included."""
    whole = random_tensors(shapes, dtype)
    layouts = [Layout(shapes, dtype, rank, ranks) for rank in range(ranks)]
    buffer = memoryview(bytearray(layouts[0].nbytes))
    for layout in layouts:
        assert layout.nbytes == layouts[0].nbytes
        mine = [t[s.rows[0] : s.rows[1]] for t, s in zip(whole, layout.slots, strict=True)]
        fill(layout.shards(buffer), mine)
    for read, written in zip(layouts[-1].views(buffer), whole, strict=True):
        assert torch.equal(read, written)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6))
def test_a_ranks_rows_are_those_that_fsdp_gives_it(rows: int, ranks: int) -> None:
    theirs = _chunk_with_empty(torch.arange(rows), ranks, dim=0)
    for rank, chunk in enumerate(theirs):
        begin, end = Layout([(rows, 3)], torch.float32, rank, ranks).slots[0].rows
        assert list(range(begin, end)) == chunk.tolist()


@settings(max_examples=100, deadline=None)
@given(model_shapes, dtypes)
def test_parameters_are_aligned_and_do_not_overlap(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    layout = Layout(shapes, dtype, 0, 1)
    end = 0
    for slot in layout.slots:
        assert slot.offset % ALIGN_BYTES == 0 and slot.offset >= end
        end = slot.offset + torch.Size(slot.shape).numel() * dtype.itemsize
    assert layout.nbytes >= end


@settings(max_examples=100, deadline=None)
@given(model_shapes, st.integers(1, 5))
def test_a_layout_of_one_ranks_rows_holds_no_others(shapes: list[tuple[int, ...]], ranks: int) -> None:
    """As gradients are staged: a rank that has no row of a parameter has an empty view of it."""
    for rank in range(ranks):
        slots = Layout(shapes, torch.float32, rank, ranks).slots
        mine = [(slot.rows[1] - slot.rows[0], *slot.shape[1:]) for slot in slots]
        layout = Layout(mine, torch.float32, 0, 1)
        buffer = memoryview(bytearray(max(layout.nbytes, 1)))
        written = random_tensors(mine, torch.float32)
        fill(layout.views(buffer), written)
        for read, expected in zip(layout.views(buffer), written, strict=True):
            assert torch.equal(read, expected)


def test_a_view_is_no_copy() -> None:
    layout = Layout([(2, 2)], torch.float32, 0, 1)
    buffer = memoryview(bytearray(layout.nbytes))
    layout.views(buffer)[0][1, 1] = 1.0
    assert bytes(buffer[12:16]) == b"\x00\x00\x80\x3f"


def test_tied_parameters_lie_in_a_region_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    assert len(parameters(model)) == 1
    assert shapes(model) == [(5, 3)]


def test_filling_converts() -> None:
    target, source = torch.zeros(2, dtype=torch.bfloat16), torch.tensor([1.0, 1.0009765625])
    fill([target], [source])
    assert target.tolist() == [1.0, 1.0]


def test_a_checksum_is_of_all_bytes() -> None:
    data = bytearray(range(256)) * 20
    expected = zlib.crc32(data)
    assert checksum(memoryview(data)) == expected
    data[-1] ^= 1
    assert checksum(memoryview(data)) != expected
