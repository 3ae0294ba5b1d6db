"""A lane: one connection that carries one operation at a time, frames and raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

from gyre.rdma.frames import LENGTH, BadFrame, Frame, decode, encode, length

# Views in one call to the kernel; it takes no more than 1024.
VIEWS = 512
# Moved in one call, and moved without giving others on the loop a turn.
CALL_BYTES = 2**20
TURN_BYTES = 4 * 2**20
HANDSHAKE_LIMIT_BYTES = 4096


class LaneLost(ConnectionError):
    """The other end has closed, or is gone."""


class Lane:
    """Owns `sock`. One sender and one receiver at a time; after any error it can only be closed."""

    def __init__(self, sock: socket.socket, peer: str = "") -> None:
        """`peer`: where the other end listens."""
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self.peer = peer
        self.closed = False
        # Called once, when it is.
        self.at_close: list[Callable[[], None]] = []
        self._keepers = 0
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that vanishes says nothing: after half a minute its connections end.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        # The waiter for each direction: closing the lane ends both.
        self._waiting: dict[str, asyncio.Future[None]] = {}

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(LaneLost("the lane was closed"))
        self._unwatch("r")
        self._unwatch("w")
        for call in self.at_close:
            call()
        if not self._keepers:
            self._sock.close()

    def keep(self) -> None:
        """The other end is to see no end of it before `let_go`: something here is still at its memory."""
        self._keepers += 1

    def let_go(self) -> None:
        self._keepers -= 1
        if self.closed and not self._keepers:
            self._sock.close()

    @property
    def idle(self) -> bool:
        """Nothing has come, so that it can be used for another operation."""
        if self.closed:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def ended(self) -> bool:
        """Until the other end says something (False) or closes (True)."""
        await self._ready("r")
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    # --- frames -----------------------------------------------------------------------------------

    async def send(self, frame: Frame) -> None:
        await self.send_bytes([memoryview(encode(frame))])

    async def receive(self) -> Frame:
        """Raises BadFrame, LaneLost."""
        return decode(await self._exactly(length(await self._exactly(LENGTH.size))))

    async def send_words(self, words: bytes) -> None:
        """Words of a handshake."""
        await self.send_bytes([memoryview(LENGTH.pack(len(words)) + words)])

    async def receive_words(self) -> memoryview:
        nbytes = length(await self._exactly(LENGTH.size))
        if nbytes > HANDSHAKE_LIMIT_BYTES:
            raise BadFrame(f"{nbytes} bytes are no handshake")
        return memoryview(await self._exactly(nbytes))

    async def _exactly(self, nbytes: int) -> bytearray:
        buffer = bytearray(nbytes)
        await self.receive_bytes([memoryview(buffer)])
        return buffer

    # --- bytes ------------------------------------------------------------------------------------

    async def send_bytes(self, views: Sequence[memoryview]) -> None:
        """From where they are, one after the other."""
        await self._move("w", views, lambda some: self._sock.sendmsg(some))

    async def receive_bytes(self, views: Sequence[memoryview]) -> None:
        """To where they belong. Raises LaneLost where fewer come."""
        await self._move("r", views, lambda some: self._sock.recvmsg_into(some)[0])

    async def _move(
        self, way: str, views: Sequence[memoryview], call: Callable[[list[memoryview]], int]
    ) -> None:
        run = _Run(views)
        turn_bytes = 0
        while some := run.next():
            if self.closed:
                raise LaneLost("the lane was closed")
            try:
                moved = call(some)
            except BlockingIOError:
                turn_bytes = 0
                await self._ready(way)
                continue
            except OSError as error:
                raise LaneLost(error.strerror or str(error)) from error
            if moved == 0:
                raise LaneLost("it closed the connection")
            run.advance(moved)
            turn_bytes += moved
            if turn_bytes >= TURN_BYTES:
                turn_bytes = 0
                await asyncio.sleep(0)

    async def _ready(self, way: str) -> None:
        if self.closed:
            raise LaneLost("the lane was closed")
        waiter = self._waiting[way] = self._loop.create_future()
        watch = self._loop.add_reader if way == "r" else self._loop.add_writer
        watch(self._sock, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiting.pop(way, None)
            self._unwatch(way)

    def _unwatch(self, way: str) -> None:
        # A socket that is closed is no longer watched.
        if self._sock.fileno() >= 0:
            with contextlib.suppress(RuntimeError):
                (self._loop.remove_reader if way == "r" else self._loop.remove_writer)(self._sock)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Run:
    """Views in order, as much of them as one call takes."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._at = 0

    def next(self) -> list[memoryview]:
        some: list[memoryview] = []
        room, at = CALL_BYTES, self._at
        for view in self._views[self._index : self._index + VIEWS]:
            part = view[at : at + room]
            at = 0
            some.append(part)
            room -= len(part)
            if room <= 0:
                break
        return some

    def advance(self, nbytes: int) -> None:
        while nbytes:
            left = len(self._views[self._index]) - self._at
            if nbytes < left:
                self._at += nbytes
                return
            nbytes -= left
            self._index += 1
            self._at = 0
