"""UCX, by ucxx: RDMA, NVLink or shared memory where two processes have them between them, TCP where not."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from gyre.actors.errors import BadMessage, LinkLost
from gyre.actors.framing import FrameTooLong, Unframer, header
from gyre.actors.transport.base import CLOSED, Accept, Receiver
from gyre.actors.transport.ucx_worker import UcxWorker

HANDSHAKE_LIMIT_BYTES = 4096
WRITE_BUFFER_BYTES = 1024 * 1024
JOIN_UP_TO_BYTES = 256 * 1024
DIAL_TIMEOUT_S = 30.0
# Without any progress: the peer may be busy.
CLOSE_TIMEOUT_S = 5.0
GREETING = b"gyre-ucx"
TRUNCATED = "it closed within a frame"


class UcxChannel:
    """Frames over an endpoint's stream. UCX takes a receive by its exact length, so frames travel in chunks
    with a header of their own: those of one turn of the loop together, a big one alone and without a copy.

    UCX does not flush when it closes, so the last header says 0: whoever reads that has all, and closes;
    that closes the other end."""

    receiver: Receiver
    far = True
    single = False

    def __init__(
        self, worker: UcxWorker, endpoint: Any, receiver: Receiver | None, accept: Accept | None = None
    ) -> None:
        from ucxx._lib.arr import Array

        self._array = Array
        self._loop = asyncio.get_running_loop()
        # Of the other end's greeting; "", or why there was none.
        self.met: asyncio.Future[str] = self._loop.create_future()
        if receiver is not None:
            self.receiver = receiver
        self._accept = accept
        self._worker = worker
        self._endpoint = endpoint
        self._unframer = Unframer(HANDSHAKE_LIMIT_BYTES)
        self._chunk = bytearray(4)
        self._sends: deque[tuple[Any, bytes | bytearray]] = deque()
        self._unsent_bytes = 0
        self._room: asyncio.Future[None] | None = None
        self._reading: tuple[Any, bytearray, Callable[[bytearray], None]] | None = None
        self._why = ""
        self._closing = False
        self._over = False
        self._timer = self._loop.call_later(DIAL_TIMEOUT_S, self.end, "no answer")
        self._write(GREETING)
        self._read(len(GREETING), self._on_greeting)
        worker.add(self)

    @property
    def limit_bytes(self) -> int:
        return self._unframer.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        self._unframer.limit_bytes = limit_bytes

    @property
    def writable(self) -> bool:
        return self._room is None

    async def drain(self) -> None:
        while self._room is not None:
            await asyncio.shield(self._room)

    # --- sending ----------------------------------------------------------------------------------

    def send(self, payload: bytes) -> None:
        if self._closing or self._over:
            return
        if len(self._chunk) + len(payload) > JOIN_UP_TO_BYTES:
            self.flush()
        if len(payload) > JOIN_UP_TO_BYTES:
            self._write(header(4 + len(payload)) + header(len(payload)))
            self._write(payload)
        else:
            self._chunk += header(len(payload))
            self._chunk += payload
        self._worker.written(self)

    def flush(self) -> None:
        """Hands UCX what waits to be joined with more."""
        if len(self._chunk) > 4 and not self._over:
            chunk, self._chunk = self._chunk, bytearray(4)
            chunk[:4] = header(len(chunk) - 4)
            self._write(chunk)

    def close(self) -> None:
        if self._closing or self._over:
            return
        if not self.met.done():
            self.abort()
            return
        self.flush()
        self._closing = True
        self._write(header(0))
        self._worker.soon()
        self._linger(-1)

    def abort(self) -> None:
        self._closing = True
        self._loop.call_soon(self.end, CLOSED)

    def _write(self, data: bytes | bytearray) -> None:
        if not self._endpoint.alive:
            return
        request = self._endpoint.stream_send(self._array(data))
        if not request.completed:
            self._sends.append((request, data))
            self._unsent_bytes += len(data)
            if self._unsent_bytes > WRITE_BUFFER_BYTES and self._room is None:
                self._room = self._loop.create_future()

    def _linger(self, unsent_bytes: int) -> None:
        """Until the other end has closed, or nothing moves any more."""
        self._timer.cancel()
        if self._unsent_bytes == unsent_bytes:
            self.end(CLOSED)
        else:
            self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._linger, self._unsent_bytes)

    # --- what UCX has done ------------------------------------------------------------------------

    def poll(self) -> None:
        """Looks at the requests that are under way."""
        if self._over:
            return
        while self._sends and self._sends[0][0].completed:
            self._unsent_bytes -= len(self._sends.popleft()[1])
        if self._unsent_bytes <= WRITE_BUFFER_BYTES // 2:
            self._give_room()
        try:
            self._poll_read()
        except (FrameTooLong, BadMessage, LinkLost) as error:
            self._refuse(str(error))
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")
            self._loop.call_exception_handler({"message": "a frame was not received", "exception": error})
        if not self._over and not self._endpoint.alive:
            self.end(self._cause())

    def _poll_read(self) -> None:
        while self._reading is not None and self._reading[0].completed:
            request, buffer, then = self._reading
            if request.status != 0:
                self.end(self._cause())
                return
            self._reading = None
            then(buffer)

    def _read(self, nbytes: int, then: Callable[[bytearray], None]) -> None:
        # What is submitted to an endpoint that has failed is never done, and keeps all UCX has.
        if not self._over and self._endpoint.alive:
            buffer = bytearray(nbytes)
            self._reading = (self._endpoint.stream_recv(self._array(buffer)), buffer, then)

    def _on_greeting(self, buffer: bytearray) -> None:
        if buffer != GREETING:
            raise LinkLost("it does not speak gyre's protocol")
        self._timer.cancel()
        if self._accept is not None:
            self.receiver = self._accept(self)
        self.met.set_result("")
        self._read(4, self._on_header)

    def _on_header(self, buffer: bytearray) -> None:
        length = int.from_bytes(buffer, "big")
        limit_bytes = max(self.limit_bytes, JOIN_UP_TO_BYTES)
        if length == 0:
            self.end(CLOSED)
        elif length > 4 + limit_bytes:
            raise FrameTooLong(length - 4, limit_bytes)
        else:
            self._read(length, self._on_chunk)

    def _on_chunk(self, buffer: bytearray) -> None:
        self._read(4, self._on_header)  # also after a refusal: the other end's last header is still to come
        for payload in self._unframer.feed(memoryview(buffer)):
            if not self._closing:
                self.receiver.received(payload)

    # --- the end ----------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """At once. UCX may not be within its progress."""
        if self._over:
            return
        self._over = self._closing = True
        self._timer.cancel()
        self._worker.part(self._endpoint, idle=self._reading is None and not self._sends)
        self._endpoint = None
        self._reading = None
        self._sends.clear()
        self._worker.forget(self)
        self._give_room()
        if self.met.done():
            self.receiver.lost(self._why or why)
        else:
            self.met.set_result(why)

    def _refuse(self, why: str) -> None:
        self._why = self._why or why
        self._worker.soon()
        if self.met.done():
            self.close()
        else:
            self.end(why)

    def _cause(self) -> str:
        try:
            self._endpoint.raise_on_error()
        except self._worker.api.UCXConnectionResetError:
            within = self._reading is not None and self._reading[2] == self._on_chunk
            return TRUNCATED if within and not self._closing else CLOSED
        except self._worker.api.UCXError as error:
            return f"UCX: {str(error).rpartition('error: ')[2]}"
        return CLOSED

    def _give_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set_result(None)


class UcxListener:
    """Calls come in at any address of this machine; who calls must hold the token. Who calls a closed one is
    hung up on, until the transport is closed: then the port is free again."""

    def __init__(self, worker: UcxWorker, where: str, accept: Accept) -> None:
        self._worker = worker
        self._accept: Accept | None = accept
        self.endpoint = f"ucx:{where}:{worker.listen(self._called)}"

    def close(self) -> None:
        self._accept = None

    def _called(self, endpoint: Any) -> None:
        if self._accept is None:
            self._worker.part(endpoint, idle=True)
        else:
            UcxChannel(self._worker, endpoint, None, self._accept)


class UcxTransport:
    """UCX; `where` is the address at which peers reach this machine."""

    scheme = "ucx"

    def __init__(self, where: str = "") -> None:
        """TransportUnusable where UCX is not installed, or does not start."""
        self.where = where or "127.0.0.1"
        self._workers: dict[bool, UcxWorker] = {}
        self._worker(self.where)

    def _worker(self, address: str) -> UcxWorker:
        # Left the choice among several networks, the two ends of a connection within one host have been seen
        # to disagree: one went from lo to eth0.
        local = address.startswith("127.")
        if local not in self._workers:
            self._workers[local] = UcxWorker("lo" if local else "")
        return self._workers[local]

    async def listen(self, name: str, accept: Accept) -> UcxListener:
        worker = self._worker(self.where)
        try:
            return UcxListener(worker, self.where, accept)
        except worker.api.UCXError as error:
            raise OSError(f"UCX cannot listen: {error}") from error

    async def dial(self, rest: str, receiver: Receiver) -> UcxChannel:
        host, _, port = rest.rpartition(":")
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, int(port), family=socket.AF_INET, type=socket.SOCK_STREAM)
        address = str(found[0][4][0])
        worker = self._worker(address)
        try:
            endpoint = worker.connect(address, int(port))
        except worker.api.UCXError as error:
            raise LinkLost(f"UCX: {error}") from error
        channel = UcxChannel(worker, endpoint, receiver)
        try:
            why = await asyncio.shield(channel.met)
        except asyncio.CancelledError:
            channel.abort()
            raise
        if why:
            raise LinkLost(why)
        return channel

    async def close(self) -> None:
        for worker in self._workers.values():
            await worker.close()
