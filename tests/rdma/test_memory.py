"""Extents, stripes and addresses, without connections."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.rdma import Extent, RegionError, RegionHandle
from gyre.rdma.copying import STEP_BYTES, steps
from gyre.rdma.dialling import parse
from gyre.rdma.memory import check_extents, stripes

NBYTES = 60
handle = RegionHandle(backend="tcp", name="w1", nbytes=NBYTES)
numbers = st.integers(-2, NBYTES + 2)
extents = st.lists(st.builds(Extent, numbers, numbers, st.integers(-1, 20)), max_size=8)
inside = st.lists(st.builds(Extent, numbers, numbers, st.integers(1, 20)), min_size=1, max_size=8)


def pairs(some: list[Extent]) -> list[tuple[int, int]]:
    """Byte by byte, from where to where."""
    return [(local + at, remote + at) for local, remote, nbytes in some for at in range(nbytes)]


@given(extents)
def test_extents_are_within_both_or_an_error(some: list[Extent]) -> None:
    with contextlib.suppress(RegionError):
        joined = check_extents("read", handle, handle, some)
        assert pairs(joined) == pairs(some)
        assert all(0 <= at < NBYTES and 0 <= far < NBYTES for at, far in pairs(some))


def test_runs_are_joined() -> None:
    some = [Extent(0, 10, 5), Extent(5, 15, 5), Extent(10, 21, 1), Extent(12, 22, 1)]
    joined = check_extents("read", handle, handle, some)
    assert joined == [Extent(0, 10, 10), Extent(10, 21, 1), Extent(12, 22, 1)]


@given(inside, st.integers(1, 4), st.integers(1, 30), st.integers(1, 3))
def test_stripes_are_the_same_bytes(
    some: list[Extent], at_most: int, bytes_each: int, pieces_each: int
) -> None:
    parts = stripes(some, at_most, bytes_each, pieces_each)
    assert pairs([extent for part in parts for extent in part]) == pairs(some)
    assert all(0 < len(part) <= pieces_each for part in parts)


def test_stripes_are_of_one_size() -> None:
    parts = stripes([Extent(0, 0, 100), Extent(100, 200, 60)], 4, 10, 16)
    assert [sum(extent.nbytes for extent in part) for part in parts] == [40, 40, 40, 40]
    assert stripes([Extent(0, 0, 100)], 4, 60, 16) == [[Extent(0, 0, 100)]]


@given(st.lists(st.integers(1, 3 * STEP_BYTES), max_size=5))
def test_steps_are_the_same_bytes(sizes: list[int]) -> None:
    some = [Extent(7 * at, 5 * at, nbytes) for at, nbytes in enumerate(sizes)]
    found = [*steps(some)]
    assert all(0 < sum(extent.nbytes for extent in step) <= STEP_BYTES for step in found)
    flat = [extent for step in found for extent in step]
    for local, remote, nbytes in some:
        while nbytes:
            extent = flat.pop(0)
            assert (extent.local, extent.remote) == (local, remote)
            local, remote, nbytes = local + extent.nbytes, remote + extent.nbytes, nbytes - extent.nbytes
    assert not flat


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("host.example:65535", ("host.example", 65535)),
        ("[::1]:1", ("::1", 1)),
        ("unix:/dev/shm/x", "/dev/shm/x"),
    ],
)
def test_an_address(address: str, place: object) -> None:
    assert parse(address) == place


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":80", "host:0", "host:65536", "host:8x", "host:-1", "unix:x", "unix:"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(address))):
        parse(address)


@given(st.text(max_size=20) | st.text(":0123456789[]unix:/", max_size=20))
def test_any_text_is_an_address_or_an_error(address: str) -> None:
    with contextlib.suppress(ValueError):
        place = parse(address)
        assert place if isinstance(place, str) else place[0] and 0 < place[1] < 65536
