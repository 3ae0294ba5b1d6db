"""`python -m tests.rdma.holder FOLDER`: a process that holds regions, and does what each line says."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import zlib
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from gyre.rdma import Backend, RegionHandle, Registration
from tests.rdma.kinds import make


class Order(msgspec.Struct, omit_defaults=True):
    """A line; `seed`: of the bytes a region begins with."""

    do: str
    kind: str
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
    return np.random.default_rng(seed).bytes(nbytes)


def digest(buffer: memoryview | bytes) -> str:
    return f"{zlib.crc32(buffer):x}"


def left(folder: Path) -> dict[str, int]:
    """What this process has: file descriptors, threads, and shared memory of all."""
    gc.collect()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(list(folder.iterdir())) if folder.exists() else 0,
    }


class Place:
    """One backend, made when first asked for."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._backend: Backend = make(kind, folder)
        self._folder = folder
        self._regions: dict[str, Registration] = {}

    async def obey(self, order: Order) -> Answer:
        backend, regions = self._backend, self._regions
        match order.do:
            case "start":
                await backend.start()
                return Answer(text=backend.address)
            case "allocate":
                region = await backend.allocate(order.name, order.nbytes, writable=order.writable)
                region.buffer[:] = noise(order.seed, order.nbytes)
            case "register":
                memory = bytearray(noise(order.seed, order.nbytes))
                region = await backend.register(order.name, memory, writable=order.writable)
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
                    return Answer(text=f"{note.peer} {note.message.decode(errors='replace')}")
            case "left":
                return Answer(text=str(left(self._folder)))
            case "end":
                await backend.close()
                return Answer()
            case _:
                raise ValueError(order.do)
        regions[order.name] = region
        return Answer(handle=region.handle)


async def main(folder: str) -> None:
    # Libraries and logs print where they like.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    places: dict[str, Place] = {}
    while line := await lines.readline():
        order = msgspec.json.decode(line, type=Order)
        if order.kind not in places:
            places[order.kind] = Place(order.kind, Path(folder))
        answer = await places[order.kind].obey(order)
        answers.write(msgspec.json.encode(answer).decode() + "\n")
        answers.flush()
    for kind, place in places.items():
        await place.obey(Order("end", kind))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
