"""The core's snapshots: memory that is used by turns; readers that are slow, gone, or copy. Those that are
killed: test_snapshot_readers.py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from structlog.testing import capture_logs

from gyre.actors import Actor, ChildSpec, Node, Ref
from gyre.cell import publishing
from gyre.cell.publishing import Snapshots
from gyre.cell.snapshots import MOST
from gyre.rdma import HeldRegions, RegionError, RegionHandle, SharedMemory, page_sum

T = TypeVar("T")

NBYTES = 2 * 4096


def run(work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
    return asyncio.create_task(work, name=name)


class House:
    """Snapshots that are written as ranks write them."""

    def __init__(self, shared: SharedMemory, lease_s: float = 60.0, *, checksums: bool = False) -> None:
        self.shared = shared
        self.held = HeldRegions(shared)
        self.snapshots = Snapshots(shared, run, checksums=checksums, lease_s=lease_s)

    def write(self, version: int) -> RegionHandle:
        with self.held.allocate(f"w{version}", NBYTES) as region:
            region.buffer[:] = bytes([version]) * NBYTES
            return region.handle

    async def start(self) -> tuple[RegionHandle, ...]:
        memory = await self.snapshots.start(0, self.write(0))
        self.snapshots.open()
        return memory

    async def commit(self, *, publish: bool = False) -> int:
        version = self.snapshots.training + 1
        await self.snapshots.room(version)
        self.snapshots.add(version, self.write(version))
        if publish:
            self.snapshots.publish()
        return version

    def inodes(self) -> set[int]:
        return {path.stat().st_ino for path in self.shared.folder.iterdir()}

    def names(self) -> set[str]:
        return {path.name for path in self.shared.folder.iterdir()}

    def live(self) -> set[str]:
        return {name for name in self.names() if name.startswith("w")}


@pytest.fixture
async def house(shm: Path) -> AsyncIterator[House]:
    made = House(SharedMemory(shm))
    await made.start()
    yield made
    made.held.close()


@pytest.fixture
async def reader() -> AsyncIterator[Ref]:
    async with Node(name="test") as node:
        yield await node.spawn(ChildSpec(name="reader", start=Actor, restart="temporary"))


async def test_all_versions_are_in_the_memory_that_was_found_at_the_start(shm: Path) -> None:
    made = House(SharedMemory(shm))
    memory = await made.start()
    inodes = made.inodes()
    assert len(memory) == len(inodes) == MOST
    for version in range(1, 12):
        kept = await made.snapshots.lease(version % 3, "published")
        await made.commit(publish=version % 2 == 0)
        made.snapshots.release(kept.lease)
        assert made.inodes() == inodes
        assert {handle.name for handle in await made.snapshots.memory()} == made.names()
    made.held.close()


async def test_a_reader_that_was_waited_for_long_enough_is_dropped(shm: Path) -> None:
    made = House(SharedMemory(shm), lease_s=0.05)
    await made.start()
    slow = await made.snapshots.lease(1, "published")
    quick = await made.snapshots.lease(2, "published")
    made.snapshots.release(quick.lease)
    await made.commit(publish=True)
    await made.commit()
    too_late = pytest.raises(RegionError, match="w0: was taken back")
    with capture_logs() as logs, too_late, made.held.open(slow.region):
        assert await made.commit() == 3
    assert logs == [
        {
            "event": "snapshot_reader_dropped",
            "log_level": "warning",
            "cell": 1,
            "version": 0,
            "waited_s": 0.05,
        }
    ]
    assert made.live() == {"w1", "w3"}
    made.snapshots.release(slow.lease)  # it is late
    assert made.live() == {"w1", "w3"}
    made.held.close()


async def test_readers_of_what_is_trained_under_or_published_hinder_nobody(shm: Path) -> None:
    made = House(SharedMemory(shm), lease_s=0.01)
    await made.start()
    held = [await made.snapshots.lease(1, "published")]
    await made.commit(publish=True)
    held += [await made.snapshots.lease(2, "published"), await made.snapshots.lease(3, "training")]
    await made.commit()
    await made.commit()  # for which cell 1 is dropped
    assert made.live() == {"w1", "w3"}
    with made.held.open(held[1].region) as source:
        assert bytes(source.buffer) == b"\x01" * NBYTES
    made.held.close()


async def test_a_commit_goes_on_when_a_reader_is_dead(house: House, reader: Ref) -> None:
    await house.snapshots.lease(1, "published", reader)
    await house.commit(publish=True)
    await house.commit()
    waiting = asyncio.create_task(house.commit())
    await asyncio.sleep(0)
    assert not waiting.done()
    house.snapshots.forget(reader)
    assert await waiting == 3


async def test_the_lease_of_a_cells_next_life_outlives_the_one_before(house: House, reader: Ref) -> None:
    """Its death may be told late."""
    await house.snapshots.lease(1, "published", reader)
    await house.snapshots.lease(1, "published", None)
    house.snapshots.forget(reader)
    await house.commit(publish=True)
    assert house.live() == {"w0", "w1"}


@pytest.mark.parametrize("checksums", [True, False])
async def test_who_copies_gets_the_checksum_of_the_version(shm: Path, checksums: bool) -> None:
    made = House(SharedMemory(shm), checksums=checksums)
    await made.start()
    for version in range(5):
        snapshot = await made.snapshots.lease(1, "training", copied=True)
        assert snapshot.version == version
        assert snapshot.checksum == page_sum(memoryview(bytes([version]) * NBYTES))
        assert (await made.snapshots.lease(2, "training")).checksum is None
        await made.commit(publish=True)
    made.held.close()


async def test_a_version_that_goes_while_it_is_summed_is_no_fault(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summing, gone = threading.Event(), threading.Event()

    def slow_sum(buffer: memoryview) -> int:
        summing.set()
        assert gone.wait(10.0)
        return page_sum(buffer)

    monkeypatch.setattr(publishing, "page_sum", slow_sum)
    made = House(SharedMemory(shm), checksums=True)
    await made.start()
    late = asyncio.create_task(made.snapshots.lease(1, "published", copied=True))
    assert await asyncio.to_thread(summing.wait, 10.0)
    first = asyncio.all_tasks() - {asyncio.current_task(), late}
    await made.snapshots.lease(1, "published")  # in place of the one that waits
    await made.commit(publish=True)
    await made.snapshots.lease(1, "published")
    assert made.live() == {"w1"}
    gone.set()
    assert [str(error) for error in await asyncio.gather(*first)] == [
        "region w0: was taken back while it was in use"
    ]
    with pytest.raises(RegionError, match="w0: was taken back"):
        await late
    snapshot = await made.snapshots.lease(2, "published", copied=True)
    assert snapshot.checksum == page_sum(memoryview(bytes([1]) * NBYTES))
    made.held.close()


async def test_a_version_that_cannot_be_summed_is_an_error_of_who_asks_and_summed_for_the_next(
    house: House,
) -> None:
    region = house.shared.folder / "w0"
    away = region.rename(house.shared.folder / "away")
    region.symlink_to(away)  # which is not followed
    with pytest.raises(RegionError, match="w0: cannot be opened"):
        await house.snapshots.lease(1, "published", copied=True)
    away.rename(region)
    snapshot = await house.snapshots.lease(2, "published", copied=True)
    assert snapshot.checksum == page_sum(memoryview(bytes(NBYTES)))
    house.snapshots.release(snapshot.lease)
    await house.commit(publish=True)
    assert house.live() == {"w1"}  # cell 1 has none


async def test_no_room_for_three_is_said_at_the_start(shm: Path) -> None:
    made = House(SharedMemory(shm))
    first = made.write(0)
    with pytest.raises(RegionError, match=r"region spare-1: cannot allocate \d+ bytes"):
        await made.snapshots.start(0, RegionHandle(backend="shm", name=first.name, nbytes=2**62))
    made.held.close()
