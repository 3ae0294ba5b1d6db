"""What cuda_ipc keeps mapped, and when it lets go, with memory of the host in place of a GPU's: all but the
driver is real. On GPUs: test_cuda_ipc.py."""

from __future__ import annotations

import asyncio
import ctypes
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from gyre.rdma import Extent, Refused, RegionError, SharedMemory, cuda_ipc, holding
from gyre.rdma.cuda_driver import Allocation
from gyre.rdma.dialling import call, parse
from gyre.rdma.frames import BadFrame, Done, Drop, Hold, encode
from gyre.rdma.lane import Lane, LaneLost
from gyre.rdma.tcp import TcpBackend
from tests.rdma.holder import left

NBYTES = 4096
ALL = [Extent(0, 0, NBYTES)]


class Gpu:
    """Of all drivers: what is allocated, and how often each allocation is mapped."""

    def __init__(self) -> None:
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.mapped: Counter[int] = Counter()
        self.reached = 0
        self.wrong: list[str] = []

    def base(self, pointer: int) -> int:
        return next(at for at, memory in self.memory.items() if 0 <= pointer - at < len(memory))


class Driver:
    gpu: Gpu

    def __init__(self, device: int) -> None:
        self._mapped: Counter[int] = Counter()

    def enter(self) -> None: ...

    def leave(self) -> None:
        if self._mapped.total():
            self.gpu.wrong.append("left with something mapped")

    def allocate(self, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes)
        self.gpu.memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, pointer: int) -> None:
        if self.gpu.mapped[pointer]:
            self.gpu.wrong.append("freed while it was mapped")
        del self.gpu.memory[pointer]

    def device_of(self, pointer: int) -> int:
        return 0

    def share(self, pointer: int) -> Allocation:
        base = self.gpu.base(pointer)
        return Allocation(base.to_bytes(64, "little"), pointer - base)

    def reach(self, handle: bytes) -> int:
        pointer = int.from_bytes(handle, "little")
        if pointer not in self.gpu.memory:
            raise cuda_ipc.CudaError("there is no such allocation")
        self.gpu.reached += 1
        self.gpu.mapped[pointer] += 1
        self._mapped[pointer] += 1
        return pointer

    def let_go(self, pointer: int) -> None:
        self.gpu.mapped[pointer] -= 1
        self._mapped[pointer] -= 1

    def copy(self, op: str, local: int, remote: int, extents: Sequence[Extent]) -> None:
        if not self._mapped[self.gpu.base(remote)]:
            self.gpu.wrong.append("copied from what is not mapped")
        for here, there, nbytes in extents:
            to, of = (local + here, remote + there) if op == "read" else (remote + there, local + here)
            ctypes.memmove(to, of, nbytes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(cuda_ipc, "Driver", Driver)
    Driver.gpu = Gpu()
    return Driver.gpu


Backend = cuda_ipc.CudaIpcBackend


@asynccontextmanager
async def two(folder: Path, gpu: Gpu) -> AsyncIterator[tuple[Backend, Backend]]:
    """A reader and an owner; when they have ended nothing is mapped, and nothing was wrong."""
    before = left(folder)
    reader, owner = (Backend(SharedMemory(folder), 0) for _ in range(2))
    await reader.start()
    await owner.start()
    yield reader, owner
    async with asyncio.timeout(20):
        await reader.close()
        await owner.close()
    assert gpu.mapped.total() == 0 and gpu.memory == {} and gpu.wrong == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert left(folder)["files"] == before["files"]


async def test_what_is_read_often_is_mapped_once(folder: Path, gpu: Gpu) -> None:
    async with two(folder, gpu) as (reader, owner):
        mine, theirs = await reader.allocate("mine", NBYTES), await owner.allocate("theirs", NBYTES)
        await asyncio.gather(*(reader.read(mine, theirs.handle, ALL) for _ in range(20)))
        for _ in range(20):
            await reader.read(mine, theirs.handle, ALL)
        assert (gpu.reached, gpu.mapped.total()) == (1, 1)
        # Freed when the reader has let go, which the driver looks at.
        await theirs.close()
        assert gpu.mapped.total() == 0
        with pytest.raises(Refused):
            await reader.read(mine, theirs.handle, ALL)
        other = await owner.allocate("theirs", NBYTES)
        await reader.read(mine, other.handle, ALL)
        assert gpu.reached == 2


async def test_an_allocation_stays_mapped_while_a_region_is_in_it(folder: Path, gpu: Gpu) -> None:
    async with two(folder, gpu) as (reader, owner):
        mine, whole = await reader.allocate("mine", NBYTES), await owner.allocate("whole", 2 * NBYTES)
        part = SimpleNamespace(
            data_ptr=lambda: whole.pointer + NBYTES, nbytes=NBYTES, is_cuda=True, is_contiguous=lambda: True
        )
        half = await owner.register("half", part)
        await reader.read(mine, half.handle, ALL)
        await reader.read(mine, whole.handle, ALL)
        await half.close()
        assert (gpu.reached, gpu.mapped.total()) == (1, 1)
        await whole.close()
        assert gpu.mapped.total() == 0


async def test_a_reader_that_ends_keeps_nobody_waiting(folder: Path, gpu: Gpu) -> None:
    async with two(folder, gpu) as (reader, owner):
        mine, theirs = await reader.allocate("mine", NBYTES), await owner.allocate("theirs", NBYTES)
        await reader.read(mine, theirs.handle, ALL)
        await reader.close()
        assert gpu.mapped.total() == 0
        async with asyncio.timeout(20):
            await theirs.close()


async def test_what_an_owner_had_is_let_go_of_when_it_is_gone(folder: Path, gpu: Gpu) -> None:
    """As when its process is killed: nothing is asked, the lane ends."""
    async with two(folder, gpu) as (reader, owner):
        mine, theirs = await reader.allocate("mine", NBYTES), await owner.allocate("theirs", NBYTES)
        await reader.read(mine, theirs.handle, ALL)
        for one in tuple(owner._readers._readers):
            one.lane.close()
        # Before the reader has seen that.
        await reader.read(mine, theirs.handle, ALL)
        assert (gpu.reached, gpu.mapped.total()) == (2, 1)
        for one in tuple(owner._readers._readers):
            one.lane.close()
        async with asyncio.timeout(20):
            while gpu.mapped.total():  # noqa: ASYNC110 - the thread of the driver does it
                await asyncio.sleep(0.001)


async def test_what_has_come_is_heard_before_anything_is_used(folder: Path, gpu: Gpu) -> None:
    """As in a process that was stopped, and goes on."""
    let_go: list[bytes | None] = []

    async def note(peer: str, allocation: bytes | None) -> None:
        await asyncio.sleep(0)
        let_go.append(allocation)

    async with two(folder, gpu) as (reader, owner):
        assert reader._lanes is not None
        owners = holding.Owners(reader._lanes, note)
        found = await owners.heard(owner.address)
        assert found is not None and not found.ended
        (theirs,) = owner._readers._readers
        theirs.lane.sock.send(encode(Drop(b"a")))
        assert await owners.heard(owner.address) is found
        assert let_go == [b"a"]
        theirs.lane.sock.send(encode(Drop(b"b")))
        theirs.lane.sock.shutdown(socket.SHUT_RDWR)
        assert await owners.heard(owner.address) is found
        assert found.ended and let_go == [b"a", b"b", None]
        await owners.close()


@asynccontextmanager
async def hostile(owner: Backend, say: Callable[[Lane], Awaitable[None]]) -> AsyncIterator[None]:
    """A reader that has been told to let go says this."""
    assert owner._lanes is not None
    lane = await call(parse(owner.address), owner._token, owner._lanes._me)
    await lane.send(Hold())
    assert isinstance(await lane.receive(), Done)

    async def hear() -> None:
        assert isinstance(await lane.receive(), Drop)
        await say(lane)

    hearing = asyncio.create_task(hear())
    yield
    await hearing
    lane.close()


async def nothing(lane: Lane) -> None:
    with pytest.raises(LaneLost):
        await lane.receive()


async def nonsense(lane: Lane) -> None:
    await lane.send(Hold())


async def end(lane: Lane) -> None:
    lane.close()


@pytest.mark.parametrize("say", [nothing, nonsense, end])
async def test_a_reader_that_does_not_answer_is_waited_for_no_longer_than_that(
    folder: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, say: Callable[[Lane], Awaitable[None]]
) -> None:
    monkeypatch.setattr(holding, "DROP_TIMEOUT_S", 0.05 if say is nothing else 60.0)
    async with two(folder, gpu) as (reader, owner):
        mine, theirs = await reader.allocate("mine", NBYTES), await owner.allocate("theirs", NBYTES)
        await reader.read(mine, theirs.handle, ALL)
        async with hostile(owner, say), asyncio.timeout(20):
            await theirs.close()
        # The other reader was asked too.
        assert gpu.mapped.total() == 0
        again = await owner.allocate("again", NBYTES)
        await again.close()


async def test_an_allocation_that_cannot_be_mapped_is_tried_again(folder: Path, gpu: Gpu) -> None:
    async with two(folder, gpu) as (reader, owner):
        mine, theirs = await reader.allocate("mine", NBYTES), await owner.allocate("theirs", NBYTES)
        memory = gpu.memory.pop(theirs.pointer)
        with pytest.raises(RegionError, match="no such allocation"):
            await reader.read(mine, theirs.handle, ALL)
        gpu.memory[theirs.pointer] = memory
        await reader.read(mine, theirs.handle, ALL)
        assert gpu.mapped.total() == 1


async def test_backends_that_keep_nothing_mapped_have_no_readers() -> None:
    backend = TcpBackend("127.0.0.1", b"token")
    await backend.start()
    assert backend._lanes is not None
    lane = await backend._lanes.another(backend.address)
    await lane.send(Hold())
    with pytest.raises((LaneLost, BadFrame)):
        await lane.receive()
    lane.close()
    await backend.close()
