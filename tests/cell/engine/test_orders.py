"""Orders of the leading rank as bytes, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.cell.engine.orders import (
    BadOrder,
    Done,
    Leave,
    PassReader,
    PassWriter,
    ReleaseKv,
    TakeKv,
    TakeWeights,
    is_pass,
    pack,
    pack_answer,
    unpack,
    unpack_answer,
)
from gyre.rdma import RegionHandle

BLOCK = 8
REGION = RegionHandle(backend="shm", name="a", nbytes=5)
numbers = st.integers(0, 2**31 - 1)


@dataclass
class Live:
    """A call, as a pass has it."""

    call: str
    start: int
    samples: bool
    table: list[int]
    ids: list[int]

    @property
    def count(self) -> int:
        return len(self.ids)


@st.composite
def pieces(draw: Any, call: str = "c") -> Live:
    start, count = draw(st.integers(0, 40)), draw(st.integers(1, 40))
    # A sequence may have blocks beyond those of the pass.
    spare = draw(st.integers(0, 3))
    # Few numbers, so that tables of a call are often alike.
    blocks = (start + count - 1) // BLOCK + 1 + spare
    table = draw(st.just(list(range(blocks))) | st.lists(numbers, min_size=blocks, max_size=blocks))
    return Live(
        call, start, draw(st.booleans()), table, draw(st.lists(numbers, min_size=count, max_size=count))
    )


@st.composite
def passes(draw: Any) -> list[Live]:
    calls = draw(st.permutations("abcdef"))[: draw(st.integers(0, 6))]
    return [draw(pieces(call)) for call in calls]


@given(st.lists(passes(), max_size=6))
def test_passes_are_told_as_they_are(asked: list[list[Live]]) -> None:
    writer, reader = PassWriter(BLOCK), PassReader()
    for one in asked:
        frame = writer.pack(one)
        assert is_pass(frame)
        told = reader.unpack(frame)
        assert len(told) == len(one)
        for got, want in zip(told, one, strict=True):
            assert (got.start, got.count, got.samples) == (want.start, want.count, want.samples)
            assert got.ids == want.ids
            assert got.table == want.table[: (want.start + want.count - 1) // BLOCK + 1]


def test_a_call_that_goes_on_is_told_in_few_bytes() -> None:
    writer, reader = PassWriter(BLOCK), PassReader()
    table = list(range(100, 164))
    sizes = []
    for at in range(500, 512):
        frame = writer.pack([Live("a", at, True, table, [7]), Live("b", at, True, table[::-1], [8])])
        first, second = reader.unpack(frame)
        assert (first.table, second.table) == (table[: at // 8 + 1], table[::-1][: at // 8 + 1])
        sizes.append(len(frame))
    assert max(sizes[1:]) < 80 < sizes[0]


@pytest.mark.parametrize(
    "order",
    [
        TakeWeights(version=3, region=REGION),
        TakeKv(),
        ReleaseKv(),
        Leave(),
    ],
)
def test_other_orders_are_told_as_they_are(order: Any) -> None:
    assert unpack(pack(order)) == order


def test_answers_are_told_as_they_are() -> None:
    for answer in (Done(), Done(error="no memory"), Done(pool=REGION), Done(leaving=True)):
        assert unpack_answer(pack_answer(answer)) == answer


@given(st.binary(max_size=60) | st.lists(numbers, max_size=15).map(lambda ns: b"\0" + _int32(ns)))
def test_any_bytes_are_an_order_or_refused(frame: bytes) -> None:
    for parse in (unpack, unpack_answer, PassReader().unpack):
        try:
            parse(frame)
        except BadOrder:
            continue


@given(passes().filter(bool), st.data())
def test_a_pass_cut_short_is_refused(asked: list[Live], data: st.DataObject) -> None:
    frame = PassWriter(BLOCK).pack(asked)
    with pytest.raises(BadOrder):
        PassReader().unpack(frame[: data.draw(st.integers(0, len(frame) - 1))])
    with pytest.raises(BadOrder):
        PassReader().unpack(frame + b"\0\0\0\0")


def test_a_pass_that_goes_on_from_one_that_was_not_told_is_refused() -> None:
    writer = PassWriter(BLOCK)
    writer.pack([Live("a", 0, True, [1], [7])])
    frame = writer.pack([Live("a", 1, True, [1], [8])])
    with pytest.raises(BadOrder, match="1 blocks told before"):
        PassReader().unpack(frame)


def _int32(ns: list[int]) -> bytes:
    return b"".join(n.to_bytes(4, "little") for n in ns)
