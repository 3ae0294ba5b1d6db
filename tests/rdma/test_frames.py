"""Whatever comes over a lane is a frame or an error."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.rdma.frames import (
    LENGTH,
    MAX_FRAME_BYTES,
    MAX_NOTE_BYTES,
    MAX_PIECES,
    BadFrame,
    Begin,
    Done,
    Frame,
    Go,
    No,
    Tell,
    decode,
    encode,
    length,
)

numbers = st.integers(-(2**63), 2**64 - 1)
begins = st.builds(
    Begin,
    op=st.sampled_from(["read", "write"]),
    name=st.just("w1"),
    key=st.just(b"key"),
    nbytes=numbers,
    pieces=st.lists(st.tuples(numbers, numbers), max_size=3),
    timeout_s=st.floats(),
)


def begin(*pieces: tuple[int, int], nbytes: int = 100, timeout_s: float = 1.0) -> Begin:
    return Begin("read", "w1", b"key", nbytes, list(pieces), timeout_s)


@pytest.mark.parametrize(
    "frame", [begin((0, 100)), begin((0, 1), (99, 1)), Tell(b"x"), Go(b"grant"), Done(), No("no")]
)
def test_a_frame_comes_back(frame: Frame) -> None:
    sent = encode(frame)
    assert length(sent[: LENGTH.size]) == len(sent) - LENGTH.size
    assert decode(sent[LENGTH.size :]) == frame


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (begin(), "0 pieces"),
        (begin(*[(0, 1)] * (MAX_PIECES + 1)), f"{MAX_PIECES + 1} pieces"),
        (begin((0, 101)), "101 bytes at 0 of a region of 100"),
        (begin((100, 1)), "1 bytes at 100"),
        (begin((-1, 2)), "2 bytes at -1"),
        (begin((0, 0)), "0 bytes at 0"),
        (begin((0, 1), timeout_s=0), "a time-out of 0"),
        (begin((0, 1), timeout_s=float("nan")), "a time-out of nan"),
        (Tell(bytes(MAX_NOTE_BYTES + 1)), f"{MAX_NOTE_BYTES + 1} bytes"),
    ],
)
def test_what_no_one_may_ask_for_is_no_frame(frame: Frame, why: str) -> None:
    with pytest.raises(BadFrame, match=why):
        decode(encode(frame)[LENGTH.size :])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_an_error(payload: bytes) -> None:
    with contextlib.suppress(BadFrame):
        decode(payload)


@given(begins)
def test_any_numbers_are_in_bounds_or_an_error(frame: Begin) -> None:
    with contextlib.suppress(BadFrame):
        found = decode(encode(frame)[LENGTH.size :])
        assert isinstance(found, Begin)
        assert all(0 <= at < at + nbytes <= found.nbytes for at, nbytes in found.pieces)
        assert 0 < found.timeout_s < float("inf")


words = (
    st.none() | st.integers(0, 9) | st.sampled_from(["begin", "tell", "go", "read"]) | st.binary(max_size=5)
)


@given(st.recursive(words, lambda some: st.lists(some, max_size=8), max_leaves=10))
def test_any_structure_is_a_frame_or_an_error(words: object) -> None:
    with contextlib.suppress(BadFrame):
        decode(msgspec.msgpack.encode(words))


@given(st.binary(min_size=4, max_size=4))
def test_any_length_is_in_bounds_or_an_error(header: bytes) -> None:
    with contextlib.suppress(BadFrame):
        assert 0 < length(header) <= MAX_FRAME_BYTES
