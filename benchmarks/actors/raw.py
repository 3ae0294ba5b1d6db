"""The machine's own limits on 64 MiB: one memcpy, and one blocking `sendall` into one `recv_into`.

Run as a module with a number of bytes it is the receiving process."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.process import companion


class Memcpy:
    """From one buffer into another, both touched before."""

    def __init__(self, nbytes: int) -> None:
        self._source = memoryview(bytearray(b"\x01" * nbytes))
        self._target = memoryview(bytearray(b"\x02" * nbytes))

    async def run(self, count: int) -> None:
        self._target[:count] = self._source[:count]


class RawSender:
    """Sends to the receiving process over TCP and waits until all has arrived."""

    def __init__(self, sock: socket.socket, nbytes: int) -> None:
        self._sock = sock
        self._source = memoryview(bytearray(b"\x01" * nbytes))

    async def run(self, count: int) -> None:
        await asyncio.to_thread(self._send, count)

    def _send(self, count: int) -> None:
        self._sock.sendall(self._source[:count])
        if self._sock.recv(1) != b"!":
            raise RuntimeError("the receiving process has ended")


@asynccontextmanager
async def raw_sender(nbytes: int) -> AsyncIterator[RawSender]:
    async with companion("benchmarks.actors.raw", str(nbytes)) as process:
        with socket.create_connection(("127.0.0.1", process.hello["port"])) as sock:
            yield RawSender(sock, nbytes)


def _receive(nbytes: int) -> None:
    target = memoryview(bytearray(b"\x02" * nbytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f'{{"port": {server.getsockname()[1]}}}', flush=True)
        sock, _ = server.accept()
    with sock:
        at = 0
        while got := sock.recv_into(target[at:]):
            at += got
            if at == nbytes:
                sock.sendall(b"!")
                at = 0


if __name__ == "__main__":
    _receive(int(sys.argv[1]))
