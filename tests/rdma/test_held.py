"""Regions that stay mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.rdma import HeldRegions, RegionError, RegionHandle, SharedMemory
from gyre.rdma.memory import pointer

NBYTES = 3 * 4096


class Locks:
    """What is locked, and how often something was."""

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.calls = 0

    def lock(self, pointer: int, nbytes: int) -> None:
        assert nbytes == NBYTES
        self.calls += 1
        self.locked.add(pointer)

    def unlock(self, pointer: int) -> None:
        self.locked.remove(pointer)


@pytest.fixture
def shared(tmp_path: Path) -> SharedMemory:
    return SharedMemory(tmp_path / "regions")


@pytest.fixture
def locks() -> Locks:
    return Locks()


@pytest.fixture
def held(shared: SharedMemory, locks: Locks) -> Iterator[HeldRegions]:
    made = HeldRegions(shared, locks)
    yield made
    made.close()
    assert not locks.locked


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_mapped_and_locked_once_whatever_it_is_called(
    shared: SharedMemory, held: HeldRegions, locks: Locks
) -> None:
    with held.allocate("w1", NBYTES) as region:
        region.buffer[:4] = b"abcd"
        at = pointer(region.buffer)
    spare = shared.rename(region.handle, "spare")
    with held.open(spare) as again:
        assert pointer(again.buffer) == at
    shared.rename(spare, "w2")
    with held.allocate("w2", NBYTES) as third:
        assert (pointer(third.buffer), bytes(third.buffer[:4])) == (at, b"abcd")
    assert (locks.calls, locks.locked) == (1, {at})


def test_what_another_writes_is_seen(shared: SharedMemory, held: HeldRegions) -> None:
    other = HeldRegions(shared)
    with held.allocate("w1", NBYTES) as region, other.open(region.handle) as source:
        region.buffer[:4] = b"abcd"
        assert bytes(source.buffer[:4]) == b"abcd"
    other.close()


def test_what_lost_its_name_while_it_was_read_is_an_error(shared: SharedMemory, held: HeldRegions) -> None:
    handle = held.allocate("w1", NBYTES).handle
    with pytest.raises(RegionError, match="region w1: was taken back while it was in use"), held.open(handle):
        shared.rename(handle, "spare")
    with pytest.raises(RegionError, match="w1: is gone"):
        held.open(handle)


def test_another_region_of_that_name_is_another(shared: SharedMemory, held: HeldRegions) -> None:
    handle = held.allocate("w1", NBYTES).handle
    spare = shared.rename(handle, "spare")
    with shared.allocate("w1", NBYTES) as other:
        other.buffer[:4] = b"new!"
    with held.open(handle) as found:
        assert bytes(found.buffer[:4]) == b"new!"
    with held.open(spare) as found:
        assert bytes(found.buffer[:4]) == bytes(4)


def test_an_error_of_the_reader_is_not_hidden(shared: SharedMemory, held: HeldRegions) -> None:
    handle = held.allocate("w1", NBYTES).handle
    with pytest.raises(KeyError, match="mine"), held.open(handle):
        shared.free(handle)
        raise KeyError("mine")


def test_what_was_freed_is_let_go_of(shared: SharedMemory, held: HeldRegions, locks: Locks) -> None:
    held.allocate("w1", NBYTES).close()
    before = descriptors()
    for number in range(5):
        held.free(RegionHandle(backend="shm", name=f"w{number + 1}", nbytes=NBYTES))
        held.allocate(f"w{number + 2}", NBYTES).close()
    assert descriptors() <= before
    assert len(locks.locked) == 1


def test_a_region_of_another_size_is_refused(held: HeldRegions) -> None:
    held.allocate("w1", NBYTES).close()
    with pytest.raises(RegionError, match=f"exists with {NBYTES} bytes, not 5"):
        held.allocate("w1", 5)
    with pytest.raises(RegionError, match="its handle says 5"):
        held.open(RegionHandle(backend="shm", name="w1", nbytes=5))
