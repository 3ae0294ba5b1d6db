from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.actors.framing import FrameTooLong, Unframer, header

PAYLOADS = st.lists(st.binary(max_size=200), max_size=20)


def framed(payloads: list[bytes]) -> bytes:
    return b"".join(header(len(payload)) + payload for payload in payloads)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(at)]


@given(PAYLOADS, st.lists(st.integers(min_value=0), max_size=30))
def test_frames_survive_any_cutting(payloads: list[bytes], cuts: list[int]) -> None:
    unframer = Unframer(1000)
    got = [bytes(view) for chunk in cut(framed(payloads), cuts) for view in unframer.feed(chunk)]
    assert got == payloads
    assert not unframer.truncated


@given(PAYLOADS.filter(bool), st.integers(min_value=1))
def test_a_truncated_stream_is_seen(payloads: list[bytes], missing: int) -> None:
    data = framed(payloads)
    whole = framed(payloads[:-1])
    data = data[: len(data) - (1 + missing % (len(data) - len(whole)))] if len(data) > len(whole) else data
    unframer = Unframer(1000)
    got = [bytes(view) for view in unframer.feed(data)]
    assert got == payloads[:-1]
    assert unframer.truncated == (len(data) > len(whole))


@given(st.binary(max_size=300), st.lists(st.integers(min_value=0), max_size=10))
def test_garbage_gives_frames_within_the_bound_or_an_error(garbage: bytes, cuts: list[int]) -> None:
    unframer = Unframer(64)
    try:
        for chunk in cut(garbage, cuts):
            for view in unframer.feed(chunk):
                assert len(view) <= 64
    except FrameTooLong as error:
        assert error.length_bytes > 64


def test_a_length_over_the_bound_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(FrameTooLong, match="a frame of 65 bytes, 64 allowed"):
        list(Unframer(64).feed((65).to_bytes(4, "big")))
