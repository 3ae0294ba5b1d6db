"""Orders of the leading rank as bytes, and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.cell.engine.base import KvPart
from gyre.cell.engine.orders import (
    BadOrder,
    Done,
    Leave,
    ReadKv,
    ReleaseKv,
    TakeKv,
    TakeWeights,
    ToldPiece,
    WriteKv,
    pack,
    pack_answer,
    pack_pass,
    unpack,
    unpack_answer,
)
from gyre.rdma import RegionHandle

BLOCK = 8
REGION = RegionHandle(backend="shm", name="a", nbytes=5)
numbers = st.integers(0, 2**31 - 1)


@st.composite
def pieces(draw: Any) -> ToldPiece:
    start, count = draw(st.integers(0, 40)), draw(st.integers(1, 40))
    blocks = (start + count - 1) // BLOCK + 1
    # A sequence may have blocks beyond those of the pass.
    table = draw(st.lists(numbers, min_size=blocks, max_size=blocks + 3))
    return ToldPiece(
        start, draw(st.booleans()), table, draw(st.lists(numbers, min_size=count, max_size=count))
    )


@given(st.lists(pieces(), max_size=9))
def test_a_pass_is_told_as_it_is(asked: list[ToldPiece]) -> None:
    told = unpack(pack_pass(asked, BLOCK))
    assert isinstance(told, list)
    assert len(told) == len(asked)
    for got, want in zip(told, asked, strict=True):
        assert (got.start, got.count, got.samples, got.ids) == (
            want.start,
            want.count,
            want.samples,
            want.ids,
        )
        assert got.table == want.table[: (want.start + want.count - 1) // BLOCK + 1]


@pytest.mark.parametrize(
    "order",
    [
        TakeWeights(version=3, region=REGION),
        TakeKv(),
        ReleaseKv(),
        ReadKv(blocks=(1, 2), region=REGION),
        WriteKv(blocks=(4,), part=KvPart(heads=(0, 2), region=REGION), first=1),
        Leave(),
    ],
)
def test_other_orders_are_told_as_they_are(order: Any) -> None:
    assert unpack(pack(order)) == order


def test_answers_are_told_as_they_are() -> None:
    for answer in (Done(), Done(error="no memory"), Done(finite=False), Done(leaving=True)):
        assert unpack_answer(pack_answer(answer)) == answer


@given(st.binary(max_size=60) | st.lists(numbers, max_size=15).map(lambda ns: b"\0" + _int32(ns)))
def test_any_bytes_are_an_order_or_refused(frame: bytes) -> None:
    for parse in (unpack, unpack_answer):
        try:
            parse(frame)
        except BadOrder:
            continue


@given(st.lists(pieces(), min_size=1, max_size=4), st.data())
def test_a_pass_cut_short_is_refused(asked: list[ToldPiece], data: st.DataObject) -> None:
    frame = pack_pass(asked, BLOCK)
    with pytest.raises(BadOrder):
        unpack(frame[: data.draw(st.integers(0, len(frame) - 1))])
    with pytest.raises(BadOrder):
        unpack(frame + b"\0\0\0\0")


def _int32(ns: list[int]) -> bytes:
    return b"".join(n.to_bytes(4, "little") for n in ns)
