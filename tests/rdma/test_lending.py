"""Regions that are copied to another machine: two nodes with a folder each."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre.actors import Actor, ActorDied, ChildSpec, Node, Ref, RemoteError, handles
from gyre.rdma import (
    Borrow,
    Corrupt,
    Lending,
    PeerLost,
    RegionHandle,
    SharedMemory,
    TransferTimeout,
    lending,
    page_sum,
)
from gyre.rdma.shm import SharedRegion
from tests.rdma.conftest import settled
from tests.rdma.holder import left

TOKEN = b"the token of these nodes"


class Holder(Actor):
    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    async def started(self) -> None:
        self._lending = Lending(self._shared, self.context.node, "holder")

    async def stopping(self) -> None:
        await self._lending.close()

    @handles(Borrow, concurrent=True)
    async def lend(self, message: Borrow) -> RegionHandle:
        return await self._lending.lend(message.region)


class Liar(Actor):
    """Lends what is not there."""

    def __init__(self, lent: RegionHandle) -> None:
        self._lent = lent

    @handles(Borrow)
    async def lend(self, message: Borrow) -> RegionHandle:
        return self._lent


class Two:
    """A node that has regions in `there`, and one that copies them to `here`."""

    def __init__(self, far: Node, holder: Ref, here: SharedMemory, near: Node) -> None:
        self.far = far
        self.holder = holder
        self.lending = Lending(here, near, "near")

    async def fetch(self, region: RegionHandle, name: str = "copy") -> RegionHandle:
        return await self.lending.fetch(region, self.holder, name)


@pytest.fixture
def there(tmp_path: Path) -> SharedMemory:
    return SharedMemory(tmp_path / "there")


@pytest.fixture
def here(tmp_path: Path) -> SharedMemory:
    return SharedMemory(tmp_path / "here")


@pytest.fixture
async def two(there: SharedMemory, here: SharedMemory) -> AsyncIterator[Two]:
    async with (
        Node("far", transport="tcp", token=TOKEN) as far,
        Node("near", transport="tcp", token=TOKEN) as near,
    ):
        await far.spawn(ChildSpec(name="holder", start=lambda: Holder(there), restart="temporary"))
        holder = await near.find("holder", at=await near.reach(await far.listen()))
        assert holder is not None
        two = Two(far, holder, here, near)
        yield two
        await two.lending.close()


def written(there: SharedMemory, content: bytes, name: str = "w1") -> RegionHandle:
    with there.allocate(name, len(content)) as region:
        region.buffer[:] = content
        return region.handle


@pytest.mark.parametrize("nbytes", [1, 3 * 2**20 + 17])
async def test_a_copy_has_the_same_bytes(
    two: Two, there: SharedMemory, here: SharedMemory, nbytes: int
) -> None:
    content = os.urandom(nbytes)
    copy = await two.fetch(written(there, content))
    assert (copy.name, copy.nbytes) == ("copy", nbytes)
    with here.open(copy) as opened:
        assert bytes(opened.buffer) == content


async def test_no_loop_waits_for_the_end_of_a_mapping(
    two: Two, there: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = written(there, bytes(100))
    closed: list[int] = []
    close = SharedRegion.close

    def watched(copy: SharedRegion) -> None:
        closed.append(threading.get_ident())
        close(copy)

    monkeypatch.setattr(SharedRegion, "close", watched)
    await two.fetch(region)
    assert len(closed) == 1
    assert closed != [threading.get_ident()]


async def test_many_copy_one_region_at_once(two: Two, there: SharedMemory, here: SharedMemory) -> None:
    region = written(there, b"abcd")
    async with asyncio.TaskGroup() as group:
        copies = [group.create_task(two.fetch(region, f"copy-{number}")) for number in range(5)]
    for copy in copies:
        with here.open(copy.result()) as opened:
            assert bytes(opened.buffer) == b"abcd"


async def test_a_name_that_is_used_again_is_another_region(
    two: Two, there: SharedMemory, here: SharedMemory
) -> None:
    for content in (b"abcd", b"efgh", b"longer"):
        region = written(there, content)
        with here.open(await two.fetch(region)) as opened:
            assert bytes(opened.buffer) == content
        here.free(region)
        there.free(region)
        here.free(RegionHandle(backend="shm", name="copy", nbytes=0))


async def test_a_region_that_is_gone_is_an_error(two: Two, there: SharedMemory, tmp_path: Path) -> None:
    region = written(there, bytes(100))
    there.free(region)
    with pytest.raises(RemoteError, match="region w1: is gone"):
        await two.fetch(region)
    assert list((tmp_path / "here").iterdir()) == []


async def test_a_holder_that_dies_is_an_error(two: Two, there: SharedMemory, tmp_path: Path) -> None:
    region = written(there, bytes(100))
    local = two.far.lookup("holder")
    assert local is not None
    await two.far.stop(local)
    with pytest.raises(ActorDied):
        await two.fetch(region)
    assert list((tmp_path / "here").iterdir()) == []


async def test_what_has_another_size_is_an_error(two: Two, there: SharedMemory, tmp_path: Path) -> None:
    written(there, bytes(100))
    with pytest.raises(RemoteError, match="has 100 bytes, its handle says 99"):
        await two.fetch(RegionHandle(backend="shm", name="w1", nbytes=99))
    assert list((tmp_path / "here").iterdir()) == []


async def test_a_holder_that_vanishes_after_it_has_lent(two: Two, tmp_path: Path) -> None:
    gone = RegionHandle(backend="tcp", name="lent-0", nbytes=100, peer="127.0.0.1:1", key=b"k")
    holder = await two.far.spawn(ChildSpec(name="liar", start=lambda: Liar(gone), restart="temporary"))
    with pytest.raises(PeerLost, match=r"region lent-0 of 127\.0\.0\.1:1: dial"):
        await two.lending.fetch(RegionHandle(backend="shm", name="w1", nbytes=100), holder, "copy")
    # The memory waits for the next.
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["spare-near"]


async def test_a_holder_that_stands_still_is_waited_for_as_long_as_a_part_may_take(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "PART_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as still:
        peer = f"127.0.0.1:{still.getsockname()[1]}"
        lent = RegionHandle(backend="tcp", name="lent-0", nbytes=100, peer=peer, key=b"k")
        holder = await two.far.spawn(ChildSpec(name="liar", start=lambda: Liar(lent), restart="temporary"))
        async with asyncio.timeout(20.0):
            with pytest.raises(TransferTimeout):
                await two.lending.fetch(RegionHandle(backend="shm", name="w1", nbytes=100), holder, "copy")
    assert [path.name for path in two.lending.shared.folder.iterdir()] == ["spare-near"]


async def test_what_never_lent_starts_no_thread_for_its_end(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched)
    await Lending(two.lending.shared, two.far, "unused").close()
    assert "lend-unused" not in started


async def test_memory_of_a_copy_is_used_again(two: Two, there: SharedMemory, here: SharedMemory) -> None:
    for content in (b"abcd", b"efgh", b"longer"):
        copy = await two.fetch(written(there, content, f"w-{content.decode()}"), "copy")
        with here.open(copy) as opened:
            assert bytes(opened.buffer) == content
        two.lending.free(copy)
        two.lending.free(copy)
        assert [(path.name, path.stat().st_size) for path in here.folder.iterdir()] == [
            ("spare-near", len(content))
        ]
    await two.lending.close()
    assert list(here.folder.iterdir()) == []


async def test_what_was_freed_is_taken_back(two: Two, there: SharedMemory, here: SharedMemory) -> None:
    first = written(there, bytes(2**20), "first")
    here.free(await two.fetch(first))
    before = left(here.folder)
    second = written(there, bytes(2**20), "second")
    here.free(await two.fetch(second))
    assert left(here.folder)["fds"] > before["fds"]
    there.free(second)
    await settled(here.folder, before)


async def test_a_copy_that_is_not_what_its_checksum_says_is_an_error(two: Two, there: SharedMemory) -> None:
    content = os.urandom(2**20 + 5)
    region, right = written(there, content), page_sum(memoryview(content))
    copy = await two.lending.refresh(region, two.holder, "copy", right)
    two.lending.free(copy)
    with pytest.raises(Corrupt, match=f"region copy: has checksum {right:#x}, not {right + 1:#x}, of w1"):
        await two.lending.refresh(region, two.holder, "copy", right + 1)
    assert [path.name for path in two.lending.shared.folder.iterdir()] == ["spare-near"]


async def test_memory_that_is_reserved_is_that_of_the_first_copy(two: Two, there: SharedMemory) -> None:
    spare = await two.lending.reserve(4)
    inode = (two.lending.shared.folder / spare.name).stat().st_ino
    right = page_sum(memoryview(b"abcd"))
    copy = await two.lending.refresh(written(there, b"abcd"), two.holder, "copy", right)
    assert (two.lending.shared.folder / copy.name).stat().st_ino == inode


async def test_memory_that_has_become_another_region_is_lent_as_that(
    two: Two, there: SharedMemory, here: SharedMemory
) -> None:
    """And no longer as what it was."""
    first = written(there, b"abcd", "w1")
    here.free(await two.fetch(first))
    second = there.rename(there.rename(first, "spare"), "w2")
    with pytest.raises(RemoteError, match="region w1: is gone"):
        await two.fetch(first)
    with here.open(await two.fetch(second)) as opened:
        assert bytes(opened.buffer) == b"abcd"


async def test_readers_do_not_wait_for_the_loop_of_the_holder(two: Two, there: SharedMemory) -> None:
    """Nor does what they read keep it waiting: it is blocked here all the while."""
    holder = two.far.lookup("holder")
    assert holder is not None
    content = os.urandom(3 * 2**20)
    lent = await holder.ask(Borrow(region=written(there, content)))
    copy = memoryview(bytearray(len(content)))

    async def read() -> None:
        desk = Lending(two.lending.shared, two.far, "reader")._desk
        try:
            await desk.read(copy, lent, False)
        finally:
            await desk.close()

    thread = threading.Thread(target=lambda: asyncio.run(read()))
    thread.start()
    thread.join(30.0)  # the loop of both nodes is this thread's
    assert not thread.is_alive()
    assert bytes(copy) == content
