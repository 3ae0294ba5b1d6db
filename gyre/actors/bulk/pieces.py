"""The bulk connection: pieces of blobs, each with a head that says where it belongs."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Protocol

from gyre.actors.errors import BadMessage, LinkLost
from gyre.actors.transport import CLOSED, Channel
from gyre.actors.transport.sockets import SocketChannel

PIECE_BYTES = 2**20
SOCKET_BUFFER_BYTES = 4 * 2**20

# Blob, offset, bytes that follow.
_HEAD = struct.Struct(">QQI")


class Landing(Protocol):
    """Where pieces end up. What it raises ends the connection."""

    def place(self, blob: int, offset: int, nbytes: int) -> memoryview:
        """Memory for a piece."""

    def landed(self, blob: int, nbytes: int) -> None:
        """The piece is in its place."""

    def pieces_lost(self, why: str) -> None:
        """Called once, last."""


class Pieces(Protocol):
    """One end of a bulk connection."""

    piece_bytes: int

    async def write(self, blob: int, offset: int, piece: memoryview) -> None:
        """Returns when the piece may be changed again. LinkLost."""

    def close(self) -> None:
        """Ends it; of what was written all arrives."""


def pieces_over(channel: Channel, landing: Landing) -> Pieces:
    """Turns a channel, whose handshake is over, into a bulk connection."""
    if isinstance(channel, SocketChannel):
        return SocketPieces(channel.detach(), landing)
    return FramedPieces(channel, landing)


class FramedPieces:
    """One piece a frame, over any channel."""

    piece_bytes = 256 * 1024

    def __init__(self, channel: Channel, landing: Landing) -> None:
        self._channel = channel
        self._landing = landing
        self._lost = ""
        channel.limit_bytes = _HEAD.size + PIECE_BYTES
        channel.receiver = self

    async def write(self, blob: int, offset: int, piece: memoryview) -> None:
        if self._lost:
            raise LinkLost(self._lost)
        self._channel.send(_HEAD.pack(blob, offset, len(piece)) + piece)
        await asyncio.sleep(0)
        if not self._channel.writable:
            await self._channel.drain()

    def close(self) -> None:
        self._channel.close()

    def received(self, payload: memoryview) -> None:
        try:
            blob, offset, nbytes = _HEAD.unpack_from(payload)
        except struct.error:
            raise BadMessage("not a piece of a blob") from None
        if nbytes != len(payload) - _HEAD.size:
            raise BadMessage("a piece of a blob of another length than it says")
        self._landing.place(blob, offset, nbytes)[:] = payload[_HEAD.size :]
        self._landing.landed(blob, nbytes)

    def lost(self, why: str) -> None:
        self._lost = why
        self._landing.pieces_lost(why)


class SocketPieces(asyncio.BufferedProtocol):
    """Pieces over a stream socket: written from where they are, read to where they belong."""

    piece_bytes = PIECE_BYTES

    def __init__(self, transport: asyncio.Transport, landing: Landing) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._landing = landing
        self._head = memoryview(bytearray(_HEAD.size))
        self._target = self._head
        self._at = 0
        self._blob = 0
        self._room: asyncio.Future[None] | None = None
        self._why = ""
        self._lost = False
        # What is written is not ours: it counts as written when the kernel has it.
        transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        # Reading goes on in another manner, which a transport looks at when it starts to read.
        transport.pause_reading()
        transport.set_protocol(self)
        transport.resume_reading()

    async def write(self, blob: int, offset: int, piece: memoryview) -> None:
        self._transport.write(_HEAD.pack(blob, offset, len(piece)))
        self._transport.write(piece)
        while self._room is not None:
            await asyncio.shield(self._room)
        if self._lost:
            raise LinkLost(self._why or CLOSED)

    def close(self) -> None:
        self._transport.close()

    # --- asyncio.BufferedProtocol ---------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at < len(self._target) or self._why:
            return
        try:
            self._next()
        except (BadMessage, LinkLost) as error:
            self._why = str(error)
            self._transport.abort()
        self._at = 0

    def _next(self) -> None:
        """A head, or what follows it, is whole."""
        if self._target is self._head:
            self._blob, offset, nbytes = _HEAD.unpack(self._head)
            self._target = self._landing.place(self._blob, offset, nbytes)
        else:
            nbytes = len(self._target)
            self._target = self._head
            # A transport may read on as long as there is something; others want to do something too.
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)
            self._landing.landed(self._blob, nbytes)

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._target = self._head
        self.resume_writing()
        self._landing.pieces_lost(self._why or (str(exc) if exc is not None else CLOSED))

    def pause_writing(self) -> None:
        if self._room is None:
            self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.set_result(None)
            self._room = None
