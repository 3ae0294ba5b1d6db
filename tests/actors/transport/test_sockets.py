"""When frames leave: alone at once, many together, and those of a long turn while it lasts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from gyre.actors.framing import Unframer
from gyre.actors.transport.sockets import JOIN_FRAMES, SocketChannel


class _Wire:
    """A channel and the socket at its other end, read without waiting."""

    def __init__(self, channel: SocketChannel, peer: socket.socket) -> None:
        self.channel = channel
        self._peer = peer
        self._unframer = Unframer(2**20)

    def arrived(self) -> list[bytes]:
        try:
            return [bytes(payload) for payload in self._unframer.feed(self._peer.recv(2**20))]
        except BlockingIOError:
            return []


class _Deaf:
    def received(self, payload: memoryview) -> None:
        raise AssertionError("nothing is sent here")

    def lost(self, why: str) -> None:
        return


@pytest.fixture
async def wire() -> AsyncIterator[_Wire]:
    mine, peer = socket.socketpair()
    peer.setblocking(False)
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_unix_connection(lambda: SocketChannel(_Deaf()), sock=mine)
    with peer:
        yield _Wire(channel, peer)
        channel.close()
        await asyncio.sleep(0)


async def _turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_frame_that_is_alone_leaves_at_once(wire: _Wire) -> None:
    for payload in (b"first", b"second"):
        wire.channel.send(payload)
        assert wire.arrived() == [payload]
        await _turns()
    assert wire.arrived() == []


async def test_after_a_turn_of_several_they_are_joined(wire: _Wire) -> None:
    wire.channel.send(b"a")
    wire.channel.send(b"b")
    await _turns()
    assert wire.arrived() == [b"a", b"b"]
    wire.channel.send(b"c")
    wire.channel.send(b"d")
    assert wire.arrived() == []
    await _turns()
    assert wire.arrived() == [b"c", b"d"]


async def test_after_a_turn_of_one_it_leaves_at_once_again(wire: _Wire) -> None:
    for turn in (b"ab", b"c"):
        for byte in turn:
            wire.channel.send(bytes([byte]))
        await _turns()
    wire.arrived()
    wire.channel.send(b"d")
    assert wire.arrived() == [b"d"]


async def test_those_of_a_long_turn_leave_while_it_lasts(wire: _Wire) -> None:
    payloads = [b"%d" % at for at in range(JOIN_FRAMES + 1)]
    wire.channel.send(payloads[0])
    wire.channel.send(payloads[1])
    await _turns()
    assert wire.arrived() == payloads[:2]
    for payload in payloads:
        wire.channel.send(payload)
    assert wire.arrived() == payloads[:JOIN_FRAMES]
    await _turns()
    assert wire.arrived() == payloads[JOIN_FRAMES:]


async def test_frames_arrive_in_order_long_and_short(wire: _Wire) -> None:
    payloads = [b"x" * size for size in (1, 300_000, 2, 3, 299_999, 4)]
    for payload in payloads:
        wire.channel.send(payload)
    arrived: list[bytes] = []
    while len(arrived) < len(payloads):
        await asyncio.sleep(0)
        arrived += wire.arrived()
    assert arrived == payloads


async def test_what_waits_leaves_before_the_end(wire: _Wire) -> None:
    wire.channel.send(b"a")
    wire.channel.send(b"b")
    wire.channel.close()
    await _turns()
    assert wire.arrived() == [b"a", b"b"]
