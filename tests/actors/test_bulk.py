"""What blobs travel by, piece by piece: the bulk connection, shared memory, memory that is used again."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import threading
from collections.abc import AsyncIterator

import pytest
import structlog.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gyre.actors import BadMessage, Blob, LinkLost, Node
from gyre.actors.bulk.memory import IDLE_BYTES, Buffer, Pool, lend, size_class
from gyre.actors.bulk.pieces import _HEAD, FramedPieces, SocketPieces
from gyre.actors.bulk.shared import Segment, open_segment
from gyre.actors.handshake import DiallerHandshake, Peer
from gyre.actors.transport.memory import MemoryChannel
from tests.actors.conftest import start
from tests.actors.test_links import Pair, framed, read_frame, stranger
from tests.actors.world import World
from tests.actors.zoo_blobs import Many, Porter, pattern

TOKEN = b"secret" * 6
MIB = 2**20


class Shelf:
    """Takes the blobs it was told of; what else comes is refused."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.blobs = {blob: bytearray(size) for blob, size in sizes.items()}
        self.landings: list[tuple[int, int]] = []
        self.why: list[str] = []

    def place(self, blob: int, offset: int, nbytes: int) -> memoryview:
        buffer = self.blobs.get(blob)
        if buffer is None or not 0 < nbytes <= len(buffer) - offset:
            raise LinkLost("no such place")
        return memoryview(buffer)[offset : offset + nbytes]

    def landed(self, blob: int, nbytes: int) -> None:
        self.landings.append((blob, nbytes))

    def pieces_lost(self, why: str) -> None:
        self.why.append(why)


class Socket(asyncio.Transport):
    """What a SocketPieces asks of its transport while it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


def feed(pieces: SocketPieces, data: bytes, chunk: int) -> None:
    """As a socket that has never more than `chunk` bytes at once, and nothing for who has given it up."""
    at = 0
    while at < len(data) and not pieces._transport.is_closing():
        room = pieces.get_buffer(-1)
        size = min(len(room), chunk, len(data) - at)
        room[:size] = data[at : at + size]
        at += size
        pieces.buffer_updated(size)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    cut=st.integers(1, 100),
    chunk=st.integers(1, 400),
)
def test_pieces_end_up_where_they_belong_however_they_are_cut(sizes: list[int], cut: int, chunk: int) -> None:
    async def main() -> None:
        shelf = Shelf(dict(enumerate(sizes)))
        pieces = SocketPieces(Socket(), shelf)
        data = b""
        for blob, size in enumerate(sizes):
            for at in range(0, size, cut):
                piece = pattern(size)[at : at + cut]
                data += _HEAD.pack(blob, at, len(piece)) + piece
        feed(pieces, data, chunk)
        assert {blob: bytes(buffer) for blob, buffer in shelf.blobs.items()} == {
            blob: pattern(size) for blob, size in enumerate(sizes)
        }

    asyncio.run(main())


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200), chunk=st.integers(1, 200))
@example(data=b"\xff" * 60, chunk=200)
def test_nonsense_on_a_bulk_connection_is_refused(data: bytes, chunk: int) -> None:
    async def main() -> None:
        shelf = Shelf({1: 10})
        socket = Socket()
        pieces = SocketPieces(socket, shelf)
        feed(pieces, data, chunk)
        assert socket.aborted == (len(data) >= _HEAD.size)
        pieces.connection_lost(None)
        assert shelf.why == ["no such place" if socket.aborted else "it closed the connection"]
        framed_pieces = FramedPieces(MemoryChannel(), shelf)
        with pytest.raises((BadMessage, LinkLost)):
            framed_pieces.received(memoryview(data))

    asyncio.run(main())


@settings(max_examples=20, deadline=None)
@given(
    blobs=st.lists(st.binary(max_size=200_000), max_size=5),
    named=st.dictionaries(st.text(max_size=5), st.binary(max_size=80_000), max_size=3),
    maybe=st.none() | st.binary(max_size=10),
)
def test_whatever_is_in_them_comes_back(
    blobs: list[bytes], named: dict[str, bytes], maybe: bytes | None
) -> None:
    async def main() -> None:
        pair = Pair(World("memory"))
        async with pair.a, pair.b:
            await pair.b.listen()
            ref = pair.carry(await start(pair.b, Porter()))
            message = Many(
                blobs=[Blob(data) for data in blobs],
                named={name: Blob(data) for name, data in named.items()},
                text="x",
                maybe=None if maybe is None else Blob(maybe),
            )
            got = await ref.ask(message)
        assert [bytes(blob.buffer) for blob in got.blobs] == blobs
        assert {name: bytes(blob.buffer) for name, blob in got.named.items()} == named
        assert (None if got.maybe is None else bytes(got.maybe.buffer)) == maybe

    asyncio.run(main())


# --- who may make one ------------------------------------------------------------------------------


@pytest.fixture
async def listening() -> AsyncIterator[Node]:
    async with Node(name="b", transport="tcp", token=TOKEN) as node:
        await node.listen()
        yield node


async def greet(
    node: Node, nonce: bytes, session: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await stranger(node)
    handshake = DiallerHandshake(TOKEN, Peer("f" * 16, "stranger", ""), nonce, session)
    writer.write(framed(handshake.hello()))
    writer.write(framed(handshake.on_hello(memoryview(await read_frame(reader)))))
    try:
        handshake.on_verdict(memoryview(await read_frame(reader)))
    except LinkLost:
        writer.close()
        raise
    return reader, writer


async def test_a_bulk_connection_belongs_to_one_link(listening: Node) -> None:
    with pytest.raises(LinkLost, match="it belongs to no connection here"):
        await greet(listening, b"b" * 32, b"n" * 32)
    control = await greet(listening, b"n" * 32)
    with pytest.raises(LinkLost, match="it belongs to no connection here"):
        await greet(listening, b"b" * 32, b"m" * 32)
    bulk = await greet(listening, b"b" * 32, b"n" * 32)
    with pytest.raises(LinkLost, match="it belongs to no connection here"):
        await greet(listening, b"c" * 32, b"n" * 32)
    assert len(listening.links.all()) == 1
    for _, writer in (bulk, control):
        writer.close()


async def test_nonsense_on_it_ends_the_link_with_one_line(listening: Node) -> None:
    with structlog.testing.capture_logs() as logs:
        reader, control = await greet(listening, b"n" * 32)
        other, bulk = await greet(listening, b"b" * 32, b"n" * 32)
        bulk.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        for end in (other, reader):
            with contextlib.suppress(ConnectionError):
                await end.read()
    assert [line["event"] for line in logs] == ["link_lost"]
    assert logs[0]["why"] == "bulk connection: a piece of no blob that was announced"
    assert listening.links.all() == []
    bulk.close()
    control.close()


# --- shared memory -----------------------------------------------------------------------------------


def test_a_segment_is_written_here_and_read_there() -> None:
    segment = Segment(1, "gyre-test", MIB)
    with contextlib.closing(segment):
        there = open_segment(os.getpid(), segment.fd, "gyre-test", MIB)
        segment.write(0, memoryview(pattern(1000)))
        segment.write(1000, memoryview(b"more"))
        assert there[:1004] == pattern(1000) + b"more"
    assert there[:3] == pattern(1000)[:3], "what is mapped stays"
    there.close()


def test_only_what_is_offered_is_opened(tmp_path: object) -> None:
    segment = Segment(1, "gyre-test", MIB)
    bare = os.memfd_create("gyre-test")
    os.ftruncate(bare, MIB)
    try:
        for pid, fd, name, nbytes in (
            (os.getpid(), segment.fd, "gyre-other", MIB),
            (os.getpid(), segment.fd, "gyre-test", 2 * MIB),
            (os.getpid(), 0, "gyre-test", MIB),
            (os.getpid(), 10**9, "gyre-test", MIB),
            (-1, segment.fd, "gyre-test", MIB),
            (os.getpid(), bare, "gyre-test", MIB),  # its owner could cut it short: SIGBUS here
        ):
            with pytest.raises(OSError):
                open_segment(pid, fd, name, nbytes)
    finally:
        os.close(bare)
        segment.close()


# --- memory that is used again ----------------------------------------------------------------------


@given(nbytes=st.integers(1, 2**30))
def test_a_size_class_holds_what_it_is_for(nbytes: int) -> None:
    assert nbytes <= size_class(nbytes) <= max(2**18, 2 * nbytes)


async def test_memory_comes_back_when_its_last_view_is_gone() -> None:
    loop = asyncio.get_running_loop()
    back = asyncio.Event()
    view = lend(Buffer(2**18).memory, loop, contextvars.copy_context(), back.set)
    part = view[10:20].toreadonly()
    del view
    gc.collect()
    await asyncio.sleep(0.01)
    assert not back.is_set()
    left = [part]
    del part
    thread = threading.Thread(target=left.clear)  # whichever thread drops it
    thread.start()
    thread.join()
    async with asyncio.timeout(20.0):
        await back.wait()


async def test_a_pool_keeps_to_its_bound() -> None:
    pool: Pool[Buffer] = Pool(asyncio.get_running_loop(), contextvars.copy_context())
    for _ in range(6):
        pool.give(Buffer(64 * MIB))
    assert pool.idle_bytes == IDLE_BYTES
    last = Buffer(2**18)
    pool.give(last)
    assert pool.idle_bytes <= IDLE_BYTES
    assert pool.take(2**18) is last
    assert pool.take(2**19) is None
    pool.close()
    pool.give(last)
    assert pool.idle_bytes == 0
