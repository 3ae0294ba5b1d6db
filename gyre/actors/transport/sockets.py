"""Unix sockets and TCP."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gyre.actors.errors import BadMessage, LinkLost
from gyre.actors.framing import FrameTooLong, Unframer, header
from gyre.actors.transport.base import CLOSED, Accept, Receiver

if TYPE_CHECKING:
    import tempfile

HANDSHAKE_LIMIT_BYTES = 4096
# The peer begins on these while the rest of a long turn is still being made.
JOIN_FRAMES = 32
JOIN_UP_TO_BYTES = 256 * 1024
DIAL_TIMEOUT_S = 30.0


class SocketChannel(asyncio.Protocol):
    """Frames over a stream socket. Those sent within one turn of the loop are joined. Where the turn before
    had no more than one, the first leaves at once: an ask that is alone does not wait for others."""

    receiver: Receiver
    far = False
    single = False
    writable = True

    def __init__(self, receiver: Receiver | None, accept: Accept | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._accept = accept
        if receiver is not None:
            self.receiver = receiver
        self._unframer = Unframer(HANDSHAKE_LIMIT_BYTES)
        self._transport: asyncio.Transport | None = None
        # As long as frames are taken: what is sent after `close` must not join what is still to be written.
        self._writer: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._turn = 0  # frames sent in this turn of the loop
        self._alone = True
        self._room: asyncio.Future[None] | None = None
        self._why = ""

    @property
    def limit_bytes(self) -> int:
        return self._unframer.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        self._unframer.limit_bytes = limit_bytes

    def send(self, payload: bytes) -> None:
        if self._writer is None:
            return
        self._turn += 1
        if self._turn == 1:
            self._loop.call_soon(self._end_turn)
            if self._alone and len(payload) <= JOIN_UP_TO_BYTES:
                self._writer.write(header(len(payload)) + payload)
                return
        self._buffer += header(len(payload))
        if len(payload) > JOIN_UP_TO_BYTES:
            self._flush()
            self._writer.write(payload)
        else:
            self._buffer += payload
            if self._turn % JOIN_FRAMES == 0 or len(self._buffer) > JOIN_UP_TO_BYTES:
                self._flush()

    async def drain(self) -> None:
        while self._room is not None:
            await asyncio.shield(self._room)

    def close(self) -> None:
        self._flush()
        self._writer = None
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._writer = None
        if self._transport is not None:
            self._transport.abort()

    def detach(self) -> asyncio.Transport:
        """The transport, for another protocol; what was sent before leaves before. LinkLost."""
        self._flush()
        transport, self._transport, self._writer = self._transport, None, None
        if transport is None:
            raise LinkLost(CLOSED)
        return transport

    def _end_turn(self) -> None:
        self._alone = self._turn == 1
        self._turn = 0
        self._flush()

    def _flush(self) -> None:
        if self._buffer and self._writer is not None:
            buffer, self._buffer = self._buffer, bytearray()
            self._writer.write(buffer)

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._writer = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=0)  # else uvloop writes no sooner than its turn ends
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            self.far = True
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._accept is not None:
            self.receiver = self._accept(self)

    def data_received(self, data: bytes) -> None:
        if self._why:
            return
        try:
            alone = self._unframer.whole(data)
            if alone is not None:
                self.single = True
                self.receiver.received(alone)
                self.single = False
                return
            for payload in self._unframer.feed(data):
                self.receiver.received(payload)
        except (FrameTooLong, BadMessage, LinkLost) as error:
            self._why = str(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._writer = None
        self.resume_writing()
        truncated = "it closed within a frame" if self._unframer.truncated else CLOSED
        self.receiver.lost(self._why or (str(exc) if exc is not None else truncated))

    def pause_writing(self) -> None:
        self.writable = False
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        self.writable = True
        if self._room is not None:
            self._room.set_result(None)
            self._room = None


class SocketListener:
    """A listening socket."""

    def __init__(self, endpoint: str, server: asyncio.Server, path: Path | None = None) -> None:
        self.endpoint = endpoint
        self._server = server
        self._path = path

    def close(self) -> None:
        self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class UnixTransport:
    """Sockets in `where`, a folder that only this user enters; made, and removed, where none is given."""

    scheme = "unix"

    def __init__(self, where: str = "") -> None:
        self.where = where
        self._own: tempfile.TemporaryDirectory[str] | None = None

    async def listen(self, name: str, accept: Accept) -> SocketListener:
        if not self.where:
            import tempfile  # with all that it imports it costs as much as the rest of the transports

            self._own = tempfile.TemporaryDirectory(prefix="gyre-", dir=_short_folder())
            self.where = self._own.name
        path = Path(self.where, f"{name}.sock")
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: SocketChannel(None, accept), path)
        os.chmod(path, 0o600)
        return SocketListener(f"unix:{path}", server, path)

    async def dial(self, rest: str, receiver: Receiver) -> SocketChannel:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, channel = await loop.create_unix_connection(lambda: SocketChannel(receiver), rest)
        return channel

    async def close(self) -> None:
        if self._own is not None:
            self._own.cleanup()


class TcpTransport:
    """TCP; `where` is the address to listen at, which peers are told; `port` 0 is any that is free."""

    scheme = "tcp"

    def __init__(self, where: str = "", port: int = 0) -> None:
        self.where = where or "127.0.0.1"
        self._port = port

    async def listen(self, name: str, accept: Accept) -> SocketListener:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: SocketChannel(None, accept), self.where, self._port)
        port = server.sockets[0].getsockname()[1]
        return SocketListener(f"tcp:{self.where}:{port}", server)

    async def dial(self, rest: str, receiver: Receiver) -> SocketChannel:
        host, _, port = rest.rpartition(":")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, channel = await loop.create_connection(lambda: SocketChannel(receiver), host, int(port))
        return channel

    async def close(self) -> None:
        return


def _short_folder() -> str | None:
    """The path of a unix socket has 107 bytes at most; a deep TMPDIR is not used."""
    import tempfile

    return None if len(tempfile.gettempdir()) < 60 else "/tmp"
