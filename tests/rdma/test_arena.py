from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.rdma import Arena, RegionError, SharedMemory


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    with tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as folder:
        yield SharedMemory(Path(folder))


def blocks(shared: SharedMemory, name: str) -> int:
    return os.stat(shared.folder / name).st_blocks * 512


def test_memory_is_there_as_it_is_used(shared: SharedMemory) -> None:
    arena = Arena(shared, "a", 2**30)
    assert blocks(shared, "a") == 0
    arena.grow(2**16)
    arena.grow(100)
    assert blocks(shared, "a") == 2**16
    arena.buffer[100:104] = b"here"
    with shared.open(arena.handle) as region:
        assert bytes(region.buffer[100:104]) == b"here"
        arena.free()
        arena.close()
        assert bytes(region.buffer[100:104]) == b"here"
    assert os.listdir(shared.folder) == []


def test_it_takes_the_place_of_what_an_earlier_life_has_left(shared: SharedMemory) -> None:
    shared.allocate("a", 10).close()
    arena = Arena(shared, "a", 4096)
    assert blocks(shared, "a") == 0 and arena.handle.nbytes == 4096
    arena.free()
    arena.close()


def test_what_there_is_no_room_for_is_an_error(shared: SharedMemory) -> None:
    arena = Arena(shared, "a", 2**44)
    with pytest.raises(RegionError, match="cannot grow"):
        arena.grow(2**44)
    arena.grow(4096)
    arena.free()
    arena.close()
    for nbytes in (0, -1, 2**70):
        with pytest.raises(RegionError, match="cannot map"):
            Arena(shared, "b", nbytes)
    assert os.listdir(shared.folder) == []


def test_views_of_it_outlive_it(shared: SharedMemory) -> None:
    arena = Arena(shared, "a", 4096)
    arena.grow(4096)
    view = arena.buffer[:4]
    arena.free()
    arena.close()
    view[:] = b"left"
    assert bytes(view) == b"left"


def test_what_was_closed_does_not_grow(shared: SharedMemory) -> None:
    """The number of its descriptor may be another file's by then."""
    arena = Arena(shared, "a", 2**16)
    arena.free()
    arena.close()
    other = shared.create("b")
    try:
        with pytest.raises(RegionError, match="was closed"):
            arena.grow(2**16)
        assert blocks(shared, "b") == 0
    finally:
        os.close(other)
