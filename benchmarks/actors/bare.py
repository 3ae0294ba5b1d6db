"""The floor: what uvloop and msgspec do without a runtime. Run as a module it is the serving process."""

from __future__ import annotations

import asyncio
import struct
import sys
from collections import deque
from typing import Any, cast

import msgspec
import uvloop

from benchmarks.actors.messages import Step

_LENGTH = struct.Struct(">I")


class BareActor:
    """A deque as mailbox and one future to wake its task."""

    def __init__(self) -> None:
        self.told = 0
        self._loop = asyncio.get_running_loop()
        self._mailbox: deque[tuple[Step, asyncio.Future[Step] | None]] = deque()
        self._wake: asyncio.Future[None] | None = None
        self.task = self._loop.create_task(self._serve())

    async def ask(self, message: Step) -> Step:
        answer: asyncio.Future[Step] = self._loop.create_future()
        self._put(message, answer)
        return await answer

    async def tell(self, message: Step) -> None:
        self._put(message, None)

    def _put(self, message: Step, answer: asyncio.Future[Step] | None) -> None:
        self._mailbox.append((message, answer))
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _serve(self) -> None:
        mailbox = self._mailbox
        while True:
            while mailbox:
                message, answer = mailbox.popleft()
                if answer is None:
                    await self._count(message)
                else:
                    answer.set_result(await self._step(message))
            self._wake = self._loop.create_future()
            await self._wake
            self._wake = None

    async def _step(self, message: Step) -> Step:
        return message

    async def _count(self, message: Step) -> None:
        self.told += 1


class _Frames(asyncio.Protocol):
    """Steps behind their length; those written within one turn of the loop leave together."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Step)
        self._out = bytearray()
        self._rest = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, step: Step) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        body = self._encoder.encode(step)
        self._out += _LENGTH.pack(len(body))
        self._out += body

    def _flush(self) -> None:
        out, self._out = self._out, bytearray()
        self._transport.write(out)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        view, at, size = memoryview(data), 0, len(data)
        while size - at >= 4:
            end = at + 4 + _LENGTH.unpack_from(data, at)[0]
            if end > size:
                break
            self.received(self._decoder.decode(view[at + 4 : end]))
            at = end
        self._rest = data[at:]

    def received(self, step: Step) -> None:
        raise NotImplementedError


class BareServer(_Frames):
    """Answers each step with itself."""

    def received(self, step: Step) -> None:
        self.send(step)


class BareClient(_Frames):
    """Asks; an answer is known by its `seq`."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[int, asyncio.Future[Step]] = {}

    async def ask(self, step: Step) -> Step:
        answer: asyncio.Future[Step] = self._loop.create_future()
        self._pending[step.seq] = answer
        self.send(step)
        return await answer

    def received(self, step: Step) -> None:
        self._pending.pop(step.seq).set_result(step)

    def close(self) -> None:
        self._transport.close()


async def dial(port: int) -> BareClient:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(BareClient, "127.0.0.1", port)
    return client


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server: Any = await loop.create_server(BareServer, "127.0.0.1", 0)
    over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)
    print(f'{{"port": {server.sockets[0].getsockname()[1]}}}', flush=True)
    await over.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve())
