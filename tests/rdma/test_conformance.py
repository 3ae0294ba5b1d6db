"""What every backend does, with a peer in another process."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from pathlib import Path

import msgspec
import pytest

from gyre.rdma import (
    Backend,
    Extent,
    Look,
    PeerLost,
    Refused,
    RegionError,
    RegionHandle,
    Registration,
    TransferError,
    TransferTimeout,
)
from gyre.rdma.tcp import TcpBackend
from tests.rdma.conftest import Holder, Local, Process, settled, within
from tests.rdma.holder import digest, left, noise
from tests.rdma.kinds import TOKEN, make

MIB = 2**20
# The libraries of some start and end slowly: one of each for all.
pytestmark = pytest.mark.asyncio(loop_scope="module")


def whole(nbytes: int) -> list[Extent]:
    return [Extent(0, 0, nbytes)]


@pytest.fixture(params=["allocate", "register"])
def way(request: pytest.FixtureRequest) -> str:
    """How the memory came to be."""
    return str(request.param)


async def begun(reading: asyncio.Future[None], mine: Registration) -> None:
    """Until the first bytes of each of its parts are there."""
    while not reading.done() and not all(mine.buffer[:: 16 * MIB]):  # noqa: ASYNC110 - memory tells nobody
        await asyncio.sleep(0)


@pytest.mark.parametrize("nbytes", [1, 4097, 33 * MIB + 3])
async def test_a_read_brings_the_bytes(
    backend: Backend, holder: Holder, way: str, nbytes: int, local: Local
) -> None:
    remote = await holder.hold("theirs", nbytes, way, seed=nbytes)
    mine = await local(nbytes, way)
    await backend.read(mine, remote, whole(nbytes))
    assert digest(mine.buffer) == digest(noise(nbytes, nbytes))


async def test_each_piece_that_is_read_is_looked_at_when_it_is_there(
    backend: Backend, holder: Holder, local: Local
) -> None:
    piece, pieces = 3 * 4096, 3000
    remote = await holder.hold("theirs", piece * pieces, seed=5)
    mine = await local(piece * pieces)
    theirs, seen = noise(5, piece * pieces), {}
    extents = [Extent(0, 5 * piece, 2000 * piece), Extent(2500 * piece, 0, 5 * piece)]

    def look(at: int) -> None:
        assert at not in seen
        seen[at] = bytes(mine.buffer[at : at + piece])

    await backend.read(mine, remote, extents, look=Look(piece, look))
    want = {at: at + 5 * piece for at in range(0, 2000 * piece, piece)}
    want |= {2500 * piece + at: at for at in range(0, 5 * piece, piece)}
    assert seen == {at: theirs[far : far + piece] for at, far in want.items()}


async def test_pieces_that_are_not_whole_are_refused(backend: Backend, holder: Holder, local: Local) -> None:
    remote, mine = await holder.hold("theirs", 100), await local(100)
    with pytest.raises(ValueError, match="10 bytes are not whole pieces of 8"):
        await backend.read(
            mine, remote, [Extent(0, 0, 16), Extent(16, 16, 10)], look=Look(8, lambda at: None)
        )


async def test_what_a_look_raises_is_raised(backend: Backend, holder: Holder, local: Local) -> None:
    remote, mine = await holder.hold("theirs", 100), await local(100)

    def look(at: int) -> None:
        raise RuntimeError(f"at {at}")

    with pytest.raises(RuntimeError, match="at 0"):
        await backend.read(mine, remote, [Extent(0, 0, 16)], look=Look(16, look))


async def test_a_read_that_ends_is_looked_at_no_more(backend: Backend, holder: Holder, local: Local) -> None:
    remote, mine = await holder.hold("theirs", 64), await local(64)
    loop, looking = asyncio.get_running_loop(), asyncio.Event()
    free, seen = threading.Event(), list[int]()

    def look(at: int) -> None:
        loop.call_soon_threadsafe(looking.set)
        free.wait(10.0)
        seen.append(at)

    reading = asyncio.create_task(backend.read(mine, remote, whole(64), look=Look(8, look)))
    async with asyncio.timeout(10.0):
        await looking.wait()
    closing = asyncio.create_task(mine.close())
    reading.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not reading.done() and not closing.done()
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await closing
    assert seen == [0]


async def test_looks_are_within_the_time_of_a_read(backend: Backend, holder: Holder, local: Local) -> None:
    remote, mine = await holder.hold("theirs", 64), await local(64)
    with pytest.raises(TransferTimeout, match=r"not done within 0\.04 s"):
        look = Look(8, lambda at: time.sleep(0.012))
        await backend.read(mine, remote, whole(64), look=look, timeout_s=0.04)


@pytest.mark.parametrize("nbytes", [1, 4097, 33 * MIB + 3])
async def test_a_write_brings_the_bytes(
    backend: Backend, holder: Holder, way: str, nbytes: int, local: Local
) -> None:
    remote = await holder.hold("theirs", nbytes, way, writable=True)
    mine = await local(nbytes, way)
    mine.buffer[:] = noise(7, nbytes)
    await backend.write(mine, remote, whole(nbytes))
    assert (await holder.ask("digest", "theirs")).text == digest(mine.buffer)


@pytest.mark.parametrize("op", ["read", "write"])
async def test_many_scattered_blocks_in_one_operation(
    backend: Backend, holder: Holder, op: str, local: Local
) -> None:
    block, blocks, mixed = 1000, 6_000, random.Random(3)
    remote = await holder.hold("theirs", block * blocks, seed=3, writable=True)
    mine = await local(block * blocks)
    theirs, ours = bytearray(noise(3, block * blocks)), bytearray(noise(4, block * blocks))
    mine.buffer[:] = ours
    at, far = (mixed.sample(range(0, block * blocks, block), blocks // 2) for _ in range(2))
    extents = [Extent(a, b, block) for a, b in zip(at, far, strict=True)]
    for a, b, _ in extents:
        if op == "read":
            ours[a : a + block] = theirs[b : b + block]
        else:
            theirs[b : b + block] = ours[a : a + block]
    await (backend.read if op == "read" else backend.write)(mine, remote, extents)
    assert digest(mine.buffer) == digest(ours)
    assert (await holder.ask("digest", "theirs")).text == digest(theirs)


async def test_an_operation_of_no_bytes_is_none(backend: Backend, holder: Holder, local: Local) -> None:
    remote = await holder.hold("theirs", 100)
    await backend.read(await local(100), remote, [])


async def test_many_operations_at_once(backend: Backend, holder: Holder, local: Local) -> None:
    nbytes, count = 100_000, 30
    remote = await holder.hold("theirs", nbytes * count, seed=5)
    mine = await local(nbytes * count)
    async with asyncio.TaskGroup() as group:
        for at in range(0, nbytes * count, nbytes):
            group.create_task(backend.read(mine, remote, [Extent(at, at, nbytes)]))
    assert digest(mine.buffer) == digest(noise(5, nbytes * count))


async def test_both_ways_at_once(backend: Backend, holder: Holder, local: Local) -> None:
    nbytes = 4 * MIB
    remote = await holder.hold("theirs", 2 * nbytes, seed=6, writable=True)
    mine = await local(2 * nbytes)
    mine.buffer[:] = noise(8, 2 * nbytes)
    kept = bytes(mine.buffer[nbytes:])
    async with asyncio.TaskGroup() as group:
        group.create_task(backend.read(mine, remote, [Extent(0, 0, nbytes)]))
        group.create_task(backend.write(mine, remote, [Extent(nbytes, nbytes, nbytes)]))
    expected = noise(6, 2 * nbytes)[:nbytes] + kept
    assert digest(mine.buffer) == digest(expected)
    assert (await holder.ask("digest", "theirs")).text == digest(expected)


async def test_notes_come_in_order_and_say_from_where(backend: Backend, holder: Holder) -> None:
    for number in range(3):
        await holder.ask("notify", f"note {number}", peer=backend.address)
    heard = []
    async for note in backend.notes():
        heard.append((note.peer, note.message))
        if len(heard) == 3:
            break
    assert heard == [(holder.address, b"note %d" % number) for number in range(3)]


async def test_a_peer_hears_notes(backend: Backend, holder: Holder) -> None:
    await backend.notify(holder.address, b"read it")
    assert (await holder.ask("hear")).text == f"{backend.address} read it"


# --- what is refused ------------------------------------------------------------------------------


async def test_another_region_or_key_or_size_is_refused(
    backend: Backend, holder: Holder, local: Local
) -> None:
    remote = await holder.hold("theirs", 100, seed=1)
    mine = await local(100)
    for changed, why in (
        ({"key": b"x" * 16}, "wrong key"),
        ({"key": b""}, "wrong key"),
        ({"name": "others"}, "no such region"),
        ({"nbytes": 50}, "has 100 bytes, not 50"),
    ):
        handle = msgspec.structs.replace(remote, **changed)
        with pytest.raises(Refused, match=f"^region {handle.name} of {holder.address}: admit: {why}"):
            await backend.read(mine, handle, whole(50))
    await backend.read(mine, remote, whole(100))
    assert bytes(mine.buffer) == noise(1, 100)


async def test_what_is_not_writable_is_not_written(backend: Backend, holder: Holder, local: Local) -> None:
    remote = await holder.hold("theirs", 100, seed=1)
    with pytest.raises(Refused, match="is read-only"):
        await backend.write(await local(100), remote, whole(100))
    assert (await holder.ask("digest", "theirs")).text == digest(noise(1, 100))


@pytest.mark.parametrize(
    "extent",
    [
        Extent(0, 1, 100),
        Extent(1, 0, 100),
        Extent(-1, 0, 10),
        Extent(0, -1, 10),
        Extent(0, 0, 0),
        Extent(0, 0, -1),
        Extent(2**64, 0, 1),
        Extent(0, 2**64, 1),
    ],
)
async def test_what_lies_outside_is_refused(
    backend: Backend, holder: Holder, extent: Extent, local: Local
) -> None:
    remote = RegionHandle(backend=backend.name, name="theirs", nbytes=100, peer=holder.address, key=b"k")
    with pytest.raises(RegionError, match="bytes at"):
        await backend.read(await local(100), remote, [Extent(0, 0, 1), extent])


async def test_local_memory_is_of_the_same_backend(backend: Backend, holder: Holder) -> None:
    remote = await holder.hold("theirs", 100)
    other = TcpBackend("127.0.0.1", TOKEN)
    await other.start()
    with pytest.raises(RegionError, match="mine: is not registered with this backend"):
        await backend.read(await other.allocate("mine", 100), remote, whole(100))
    await other.close()


async def test_another_backend_is_named(backend: Backend, local: Local) -> None:
    remote = RegionHandle(backend="pigeon", name="theirs", nbytes=100, peer=backend.address, key=b"k")
    with pytest.raises(RegionError, match="theirs: is on backend 'pigeon', not"):
        await backend.read(await local(100), remote, whole(100))


async def test_a_name_is_registered_once_and_can_be_used_again(backend: Backend, local: Local) -> None:
    mine = await local(100)
    name = mine.handle.name
    with pytest.raises(RegionError, match=f"{name}: is registered already"):
        await backend.allocate(name, 100)
    with pytest.raises(RegionError, match="no region name"):
        await backend.allocate("../mine", 100)
    await mine.close()
    await mine.close()
    again = await backend.allocate(name, 200)
    assert (again.handle.nbytes, bytes(again.buffer)) == (200, bytes(200))
    await again.close()


async def test_memory_that_cannot_be_registered(backend: Backend) -> None:
    for memory, writable, why in (
        (b"", False, "has no bytes"),
        (b"abc", True, "is read-only"),
        ("abc", False, "cannot be registered"),
        (memoryview(bytearray(10))[::2], False, "cannot be registered"),
    ):
        with pytest.raises(RegionError, match=why):
            await backend.register("mine", memory, writable=writable)
    for nbytes in (0, -1, 1 << 60):
        with pytest.raises(RegionError, match=f"cannot allocate {nbytes} bytes"):
            await backend.allocate("mine", nbytes)


# --- ends -----------------------------------------------------------------------------------------


async def test_a_region_that_was_closed_is_refused(backend: Backend, holder: Holder, local: Local) -> None:
    remote = await holder.hold("theirs", 100)
    mine = await local(100)
    await backend.read(mine, remote, whole(100))
    await holder.ask("close", "theirs")
    with pytest.raises(Refused, match="no such region"):
        await backend.read(mine, remote, whole(100))
    # The same name is not the same region.
    await holder.hold("theirs", 100)
    with pytest.raises(Refused, match="wrong key"):
        await backend.read(mine, remote, whole(100))


async def test_closing_waits_for_what_has_begun(backend: Backend, holder: Holder, local: Local) -> None:
    nbytes = 48 * MIB
    remote = await holder.hold("theirs", nbytes, seed=9)
    mine = await local(nbytes)
    reading = asyncio.ensure_future(backend.read(mine, remote, whole(nbytes)))
    await begun(reading, mine)
    holder.tell("close", "theirs")
    closing = asyncio.ensure_future(mine.close())
    copy = mine.buffer
    await reading
    await closing
    await holder.heard()
    assert digest(copy) == digest(noise(9, nbytes))
    with pytest.raises(RegionError, match="is closed"):
        await backend.read(mine, remote, whole(1))


async def test_a_cancelled_read_writes_no_more(backend: Backend, holder: Holder, local: Local) -> None:
    nbytes = 48 * MIB
    remote = await holder.hold("theirs", nbytes, seed=2)
    mine = await local(nbytes)
    reading = asyncio.ensure_future(backend.read(mine, remote, whole(nbytes)))
    await begun(reading, mine)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    copy = mine.buffer
    await mine.close()  # until nobody writes there
    copy[:] = bytes(nbytes)
    await holder.ask("close", "theirs")  # would wait for who is at it
    assert digest(copy) == digest(bytes(nbytes))


async def test_a_cancelled_write_lets_go(backend: Backend, holder: Holder, local: Local) -> None:
    nbytes = 32 * MIB
    remote = await holder.hold("theirs", nbytes, writable=True)
    mine = await local(nbytes)
    blocks = [Extent(at, at, 65536) for at in reversed(range(0, nbytes, 65536))]
    for after_s in (0.001, 0.01):
        writing = asyncio.ensure_future(backend.write(mine, remote, blocks))
        await asyncio.sleep(after_s)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        mine.buffer[:] = noise(int(1000 * after_s), nbytes)
        async with asyncio.timeout(20):
            await backend.write(mine, remote, blocks)
    assert (await holder.ask("digest", "theirs")).text == digest(mine.buffer)
    async with asyncio.timeout(20):
        await holder.ask("close", "theirs")


async def test_a_peer_that_stands_still(backend: Backend, holder: Holder, local: Local) -> None:
    remote = await holder.hold("theirs", MIB, seed=2)
    mine = await local(MIB)
    holder.process.send_signal(19)
    try:
        with pytest.raises(TransferTimeout, match=r"theirs of .*: (dial|admit): not done within 0.1 s"):
            await backend.read(mine, remote, whole(MIB), timeout_s=0.1)
        with pytest.raises(TransferTimeout, match=r"(dial|notify): not done within 0.1 s"):
            await backend.notify(holder.address, b"wake up", timeout_s=0.1)
    finally:
        holder.process.send_signal(18)
    await backend.read(mine, remote, whole(MIB))
    assert digest(mine.buffer) == digest(noise(2, MIB))


async def test_a_peer_that_is_killed(backend: Backend, kind: str, folder: Path, local: Local) -> None:
    nbytes = 32 * MIB
    mine = await local(nbytes)
    files = set(os.listdir(folder))
    process = Process(folder)
    holder = Holder(process, kind)
    await holder.start()
    remote = await holder.hold("victim", nbytes, seed=2)
    await backend.read(mine, remote, whole(nbytes))

    async def read_on() -> None:
        while True:
            await backend.read(mine, remote, whole(nbytes), timeout_s=10)

    reading = asyncio.ensure_future(read_on())
    lost = [asyncio.ensure_future(backend.until_lost(holder.address)) for _ in range(2)]
    lost[0].cancel()
    await asyncio.sleep(0.03)
    assert not lost[1].done()
    process.kill()
    async with asyncio.timeout(20):
        await lost[1]
        # And of one that cannot be reached by now.
        await backend.until_lost(holder.address)
    with pytest.raises(TransferError, match=f"victim of {holder.address}: (dial|admit|move)"):
        await reading
    with pytest.raises(PeerLost, match="dial"):
        await backend.read(mine, remote, whole(nbytes), timeout_s=10)
    with pytest.raises(PeerLost, match="dial"):
        await backend.notify(holder.address, b"still there?", timeout_s=10)
    process.end()
    for file in set(os.listdir(folder)) - files:
        os.unlink(folder / file)  # as the sweep of a job does


async def test_a_backend_that_was_closed_does_nothing(kind: str, folder: Path, holder: Holder) -> None:
    remote = await holder.hold("theirs", 100)
    backend = make(kind, folder)
    await backend.start()
    mine = await backend.allocate("mine", 100)
    await backend.read(mine, remote, whole(100))
    await backend.close()
    with pytest.raises(RegionError, match="mine: is closed"):
        await backend.read(mine, remote, whole(100))
    with pytest.raises(TransferError, match="is not running"):
        await backend.notify(holder.address, b"hello")
    with pytest.raises(TransferError, match="is not running"):
        await backend.until_lost(holder.address)
    with pytest.raises(RegionError, match="is not running"):
        await backend.allocate("more", 100)
    assert [note async for note in backend.notes()] == []
    await backend.close()


async def test_hundreds_of_failed_reads_leave_nothing(
    backend: Backend, holder: Holder, folder: Path, local: Local
) -> None:
    remote = await holder.hold("theirs", MIB)
    wrong = msgspec.structs.replace(remote, key=b"x")
    mine = await local(MIB)

    async def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(Refused):
                await backend.read(mine, wrong, whole(MIB))

    await fail(3)
    before, there = left(folder), await holder.left()
    await fail(300)
    await settled(folder, before)
    async with asyncio.timeout(20):
        while not within(await holder.left(), there):  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.01)
