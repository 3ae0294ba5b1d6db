"""Lanes to peers: dialled when needed, proved on both sides, kept for the next operation."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gyre.actors.errors import LinkLost
from gyre.actors.handshake import NONCE_BYTES, DiallerHandshake, ListenerHandshake, Peer, verdict
from gyre.rdma.frames import BadFrame
from gyre.rdma.lane import Lane, LaneLost
from gyre.rdma.stages import Rejected

# To one peer: more operations than that wait for one another.
LANES = 8
# After a call that nobody answered the next waits, longer each time: peers that are gone must not be stormed.
FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 5.0


def parse(address: str) -> tuple[str, int] | str:
    """A path of a unix socket, or host and port. Raises ValueError."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/") or "\0" in path or len(os.fsencode(path)) > 107:
            raise ValueError(f"{address!r} is no address: unix:/path, of at most 107 bytes")
        return path
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "\0" in host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is no address: host:port, or unix:/path")
    return host, int(port)


class _Way:
    """To one peer."""

    def __init__(self) -> None:
        self.room = asyncio.Semaphore(LANES)
        self.idle: list[Lane] = []
        self.failures = 0
        self.not_before = 0.0


class Lanes:
    """`token`: what both ends must hold. `me`: what peers are told of this end."""

    def __init__(self, token: bytes, me: Peer) -> None:
        self._token = token
        self._me = me
        self._ways: dict[str, _Way] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def lane(self, address: str) -> AsyncIterator[Lane]:
        """To the peer, alone; kept for the next where no error comes. Raises LaneLost, ValueError."""
        way = self._ways.setdefault(address, _Way())
        async with way.room:
            lane = self._kept(way) or await self._dial(address, way)
            try:
                yield lane
            except Rejected:
                way.idle.append(lane)  # all that was said there was heard
                raise
            except BaseException:
                lane.close()
                raise
            if not lane.closed:
                way.idle.append(lane)

    async def another(self, address: str) -> Lane:
        """One that the caller closes. Raises LaneLost, ValueError."""
        return await call(parse(address), self._token, self._me)

    async def until_lost(self, address: str) -> None:
        """Until the peer is gone; ValueError where there is no such address. One lane, of no operation, tells
        all who wait, now and later."""
        parse(address)
        watch = self._watches.get(address)
        if watch is None:
            watch = asyncio.get_running_loop().create_task(self._watch(address), name=f"watch {address}")
            self._watches[address] = watch
            watch.add_done_callback(lambda _: self._watches.pop(address, None))
        await asyncio.wait({watch})

    async def _watch(self, address: str) -> None:
        try:
            lane = await self.another(address)
        except LaneLost:
            return
        try:
            # Unasked it says nothing, as long as it lives.
            await lane.ended()
        except LaneLost:
            pass
        finally:
            lane.close()

    async def close(self) -> None:
        watches = [*self._watches.values()]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for way in self._ways.values():
            for lane in way.idle:
                lane.close()
        self._ways.clear()

    def _kept(self, way: _Way) -> Lane | None:
        while way.idle:
            lane = way.idle.pop()
            if lane.idle:
                return lane
            lane.close()
        return None

    async def _dial(self, address: str, way: _Way) -> Lane:
        loop = asyncio.get_running_loop()
        place = parse(address)
        if (wait_s := way.not_before - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        try:
            lane = await call(place, self._token, self._me)
        except LaneLost:
            wait_s = min(FIRST_WAIT_S * 2**way.failures, LONGEST_WAIT_S)
            way.failures = min(way.failures + 1, 16)
            way.not_before = loop.time() + wait_s
            raise
        way.failures, way.not_before = 0, 0.0
        return lane


async def call(place: tuple[str, int] | str, token: bytes, me: Peer) -> Lane:
    """A lane on which both have proved that they hold the token. Raises LaneLost."""
    try:
        lane = Lane(await _connected(place))
    except OSError as error:
        raise LaneLost(f"no connection: {error.strerror or error}") from error
    try:
        handshake = DiallerHandshake(token, me, os.urandom(NONCE_BYTES))
        await lane.send_words(handshake.hello())
        await lane.send_words(handshake.on_hello(await lane.receive_words()))
        handshake.on_verdict(await lane.receive_words())
        lane.peer = handshake.peer.endpoint
    except (LinkLost, BadFrame) as error:
        lane.close()
        raise LaneLost(str(error)) from error
    except BaseException:
        lane.close()
        raise
    return lane


async def answer(lane: Lane, token: bytes, me: Peer) -> None:
    """The other side of `call`. Raises LaneLost."""
    handshake = ListenerHandshake(token, me, os.urandom(NONCE_BYTES))
    try:
        await lane.send_words(handshake.on_hello(await lane.receive_words()))
        handshake.on_proof(await lane.receive_words())
    except (LinkLost, BadFrame) as error:
        await lane.send_words(verdict("refused", str(error)))
        raise LaneLost(str(error)) from error
    await lane.send_words(verdict("welcome"))
    lane.peer = handshake.peer.endpoint


async def _connected(place: tuple[str, int] | str) -> socket.socket:
    loop = asyncio.get_running_loop()
    family, target = socket.AF_UNIX, place
    if not isinstance(place, str):
        family, host = await _resolved(place[0])
        target = (host, place[1])
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def _resolved(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return found[0][0], str(found[0][4][0])
    return (socket.AF_INET if version == 4 else socket.AF_INET6), host


def listening(where: str) -> socket.socket:
    """`where`: a path, or an address of this machine. Raises OSError."""
    family = socket.AF_UNIX if where.startswith("/") else socket.AF_INET6 if ":" in where else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(where if family == socket.AF_UNIX else (where, 0))
        sock.listen(128)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
