"""`python -m tests.rdma.holder KIND FOLDER`: a process that holds regions, and does what each line says."""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
from pathlib import Path

import msgspec
import uvloop

from gyre.rdma import Backend, RegionHandle, Registration
from tests.rdma.kinds import make


class Order(msgspec.Struct, omit_defaults=True):
    """A line; `seed`: of the bytes a region begins with."""

    do: str
    name: str = ""
    nbytes: int = 0
    writable: bool = False
    seed: int = 0
    peer: str = ""


class Answer(msgspec.Struct, omit_defaults=True):
    """The line that answers."""

    handle: RegionHandle | None = None
    text: str = ""


def noise(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def digest(buffer: memoryview | bytes) -> str:
    return hashlib.blake2b(buffer).hexdigest()


async def obey(backend: Backend, regions: dict[str, Registration], order: Order) -> Answer:
    match order.do:
        case "allocate":
            region = backend.allocate(order.name, order.nbytes, writable=order.writable)
            region.buffer[:] = noise(order.seed, order.nbytes)
        case "register":
            memory = bytearray(noise(order.seed, order.nbytes))
            region = backend.register(order.name, memory, writable=order.writable)
        case "digest":
            return Answer(text=digest(regions[order.name].buffer))
        case "close":
            await regions.pop(order.name).close()
            return Answer()
        case "clear":
            while regions:
                await regions.popitem()[1].close()
            return Answer()
        case "notify":
            await backend.notify(order.peer, order.name.encode())
            return Answer()
        case "hear":
            async for note in backend.notes():
                return Answer(text=f"{note.peer} {note.message.decode()}")
        case _:
            raise ValueError(order.do)
    regions[order.name] = region
    return Answer(handle=region.handle)


async def main(kind: str, folder: str) -> None:
    backend = make(kind, Path(folder))
    await backend.start()
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    say(Answer(text=backend.address))
    regions: dict[str, Registration] = {}
    while line := await lines.readline():
        say(await obey(backend, regions, msgspec.json.decode(line, type=Order)))
    await backend.close()


def say(answer: Answer) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
