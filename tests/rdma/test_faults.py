"""Peers that do not behave, at each stage: what is told, and that nothing stays."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gyre.actors.handshake import Peer
from gyre.rdma import Extent, PeerLost, Refused, RegionHandle, TransferError, TransferTimeout
from gyre.rdma.dialling import answer, call, listening, parse
from gyre.rdma.frames import LENGTH, Begin, Done, Go, No, Tell, encode
from gyre.rdma.lane import Lane, LaneLost
from gyre.rdma.shm_backend import ShmBackend
from gyre.rdma.tcp import TcpBackend
from tests.rdma.conftest import settled
from tests.rdma.holder import left
from tests.rdma.kinds import TOKEN, make

NBYTES = 2**20
Act = Callable[[Lane], Awaitable[None]]
Pair = TcpBackend | ShmBackend


@pytest.fixture(params=["tcp", "shm"])
async def backend(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Pair]:
    before = left(folder)
    backend = make(request.param, folder)
    assert isinstance(backend, TcpBackend | ShmBackend)
    await backend.start()
    yield backend
    async with asyncio.timeout(20):
        await backend.close()
    await settled(folder, before)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@asynccontextmanager
async def holder(backend: Pair, act: Act, folder: Path, *, greet: bool = True) -> AsyncIterator[RegionHandle]:
    """One that acts, and then stands still. `greet`: it holds the token."""
    where = str(folder / ".hostile") if backend.name == "shm" else "127.0.0.1"
    sock = listening(where)
    address = f"unix:{where}" if backend.name == "shm" else f"{where}:{sock.getsockname()[1]}"
    lanes: list[Lane] = []

    async def serve() -> None:
        while True:
            lane = Lane((await asyncio.get_running_loop().sock_accept(sock))[0])
            lanes.append(lane)
            if greet:
                await answer(lane, backend._token, Peer("", "hostile", address))
            await act(lane)

    serving = asyncio.ensure_future(serve())
    try:
        yield RegionHandle(backend=backend.name, name="theirs", nbytes=NBYTES, peer=address, key=b"k")
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for lane in lanes:
            lane.close()
        sock.close()
        if backend.name == "shm":
            os.unlink(where)


async def nothing(lane: Lane) -> None:
    pass


async def hang_up(lane: Lane) -> None:
    lane.close()


async def hear_and_hang_up(lane: Lane) -> None:
    await lane.receive()
    lane.close()


def says(*words: bytes, then: Act = nothing) -> Act:
    async def act(lane: Lane) -> None:
        await lane.receive()
        for word in words:
            await lane.send_bytes([memoryview(word)])
        await then(lane)

    return act


GO = encode(Go())
HALF = bytes(NBYTES // 2)

ACTS = [
    ("dial", nothing, False, TransferTimeout, "not done within"),
    ("dial", hang_up, False, PeerLost, "it closed the connection|reset"),
    ("dial", says(b"\xff" * 64), False, PeerLost, "a frame of 4294967295 bytes"),
    ("dial", says(struct.pack(">I", 5000) + bytes(5000)), False, PeerLost, "5000 bytes are no handshake"),
    ("dial", says(struct.pack(">I", 3) + b"abc"), False, PeerLost, "not a handshake"),
    ("admit", nothing, True, TransferTimeout, "not done within"),
    ("admit", hang_up, True, PeerLost, "it closed the connection|reset|Broken pipe"),
    ("admit", hear_and_hang_up, True, PeerLost, "it closed the connection"),
    ("admit", says(b"\xff" * 64), True, PeerLost, "a frame of 4294967295 bytes"),
    ("admit", says(LENGTH.pack(0)), True, PeerLost, "a frame of 0 bytes"),
    ("admit", says(LENGTH.pack(3) + b"abc"), True, PeerLost, "not a frame"),
    ("admit", says(encode(Done())), True, PeerLost, "a Done where a Go belongs"),
    ("admit", says(encode(No("not today"))), True, Refused, "not today"),
    ("move", says(GO, HALF, then=hang_up), True, PeerLost, "it closed the connection"),
    ("move", says(GO, HALF), True, TransferTimeout, "not done within"),
]


@pytest.mark.parametrize(("stage", "act", "greet", "kind", "why"), ACTS)
async def test_a_holder_that_does_not_behave(
    backend: Pair, folder: Path, stage: str, act: Act, greet: bool, kind: type[TransferError], why: str
) -> None:
    if backend.name == "shm" and stage == "move":
        act, kind, why = says(GO), PeerLost, "not a grant"
    mine = await backend.allocate("mine", NBYTES)
    if not greet and act not in (nothing, hang_up):
        act = _raw(act)
    async with holder(backend, act, folder, greet=greet) as theirs:
        with pytest.raises(kind, match=rf"region theirs of .*: {stage}: .*({why})") as caught:
            timeout_s = 0.4 if kind is TransferTimeout else 20.0
            await backend.read(mine, theirs, [Extent(0, 0, NBYTES)], timeout_s=timeout_s)
        assert (caught.value.stage, caught.value.peer, caught.value.name) == (stage, theirs.peer, "theirs")
        await mine.close()


def _raw(act: Act) -> Act:
    """Hears a handshake's words as the frame that they are not."""

    async def acting(lane: Lane) -> None:
        await lane.receive_words()
        lane.receive = _heard  # type: ignore[method-assign]
        await act(lane)

    return acting


async def _heard() -> Done:
    return Done()


async def test_a_holder_with_another_token(folder: Path) -> None:
    theirs, mine = TcpBackend("127.0.0.1", b"x" * 32), TcpBackend("127.0.0.1", TOKEN)
    await theirs.start()
    await mine.start()
    region = await theirs.allocate("theirs", 100)
    with pytest.raises(PeerLost, match="dial: wrong token"):
        await mine.read(await mine.allocate("mine", 100), region.handle, [Extent(0, 0, 100)])
    await mine.close()
    await theirs.close()


async def test_after_a_failed_call_the_next_waits(folder: Path) -> None:
    backend = TcpBackend("127.0.0.1", TOKEN)
    await backend.start()
    sock = listening("127.0.0.1")
    gone = f"127.0.0.1:{sock.getsockname()[1]}"
    sock.close()
    loop = asyncio.get_running_loop()
    started = loop.time()
    for _ in range(3):
        with pytest.raises(PeerLost, match="dial: no connection"):
            await backend.notify(gone, b"hello", timeout_s=5)
    assert loop.time() - started >= 0.05 + 0.1
    with pytest.raises(TransferTimeout, match="dial: not done within"):
        await backend.notify(gone, b"hello", timeout_s=0.01)
    await backend.close()


# --- those that ask -------------------------------------------------------------------------------


@asynccontextmanager
async def asker(backend: Pair) -> AsyncIterator[Lane]:
    lane = await call(parse(backend.address), backend._token, Peer("", "hostile", "nowhere:1"))
    yield lane
    lane.close()


def begin(key: bytes, op: str = "read", timeout_s: float = 30.0) -> Begin:
    return Begin("write" if op == "write" else "read", "mine", key, NBYTES, [(0, NBYTES)], timeout_s)


@pytest.mark.parametrize("op", ["read", "write"])
async def test_an_asker_that_vanishes_lets_go(backend: Pair, op: str) -> None:
    mine = await backend.allocate("mine", NBYTES, writable=True)
    async with asker(backend) as lane:
        await lane.send(begin(mine.handle.key, op))
        assert isinstance(await lane.receive(), Go)
        closing = asyncio.ensure_future(mine.close())
        await asyncio.sleep(0)
        assert not closing.done()
        if op == "write" and backend.name == "tcp":
            await lane.send_bytes([memoryview(HALF)])
    async with asyncio.timeout(20):
        await closing


async def test_an_asker_that_takes_nothing_is_given_up(folder: Path) -> None:
    backend = TcpBackend("127.0.0.1", TOKEN)
    await backend.start()
    mine = await backend.allocate("mine", 64 * NBYTES)
    async with asker(backend) as lane:
        pieces = [(0, 64 * NBYTES)]
        await lane.send(Begin("read", "mine", mine.handle.key, 64 * NBYTES, pieces, 0.1))
        async with asyncio.timeout(20):
            await mine.close()
    await backend.close()


@pytest.mark.parametrize(
    "words",
    [
        b"\xff" * 64,
        LENGTH.pack(0),
        LENGTH.pack(3) + b"abc",
        encode(Begin("read", "mine", b"", 10, [(5, 6)], 1.0)),
        encode(Begin("read", "mine", b"", 10, [], 1.0)),
        encode(Go()),
        encode(Tell(b"x"))[:-1],
    ],
)
async def test_words_that_no_asker_may_say_end_the_lane(backend: Pair, words: bytes) -> None:
    mine = await backend.allocate("mine", NBYTES)
    async with asker(backend) as lane:
        await lane.send_bytes([memoryview(words)])
        lane.sock.shutdown(1)
        async with asyncio.timeout(20):
            with pytest.raises(LaneLost):
                await lane.receive()
    await mine.close()
