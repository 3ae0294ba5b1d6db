"""xoscar, driven from a process of its own: `python -m benchmarks.actors.xoscar_peer`.

Each line of standard input is `SEGMENT COUNT`; each is answered by a line of JSON with the seconds it took.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import msgspec
import uvloop

from benchmarks.actors.messages import FIELDS, Step

try:
    import xoscar as xo
except ImportError as error:  # told to whoever started us
    print(msgspec.json.encode({"missing": f"xoscar cannot be imported: {error}"}).decode(), flush=True)
    sys.exit(0)

IN_FLIGHT = 64


class Echo(xo.Actor):  # type: ignore[misc,unused-ignore]
    """Does nothing but answer."""

    async def step(self, message: Step) -> Step:
        return message


class Driver:
    """`inside` is an actor of the main process, `across` one of the pool's other process; xoscar itself
    chooses what lies between (on one host a unix socket)."""

    def __init__(self, inside: Any, across: Any, address: str) -> None:
        self._actors = {"inside": inside, "across": across}
        self._address = address
        self._names = itertools.count()

    async def run(self, segment: str, count: int) -> float:
        where, _, what = segment.partition(".")
        actor = self._actors[where]
        segments: dict[str, Callable[[Any, int], Awaitable[None]]] = {
            "sequential": self._sequential,
            "in_flight": self._in_flight,
            "tell": self._tell,
            "spawn": self._spawn,
        }
        start = perf_counter()
        await segments[what](actor, count)
        return perf_counter() - start

    async def _sequential(self, actor: Any, count: int) -> None:
        for seq in range(count):
            await actor.step(Step(seq=seq, **FIELDS))

    async def _in_flight(self, actor: Any, count: int) -> None:
        seqs = iter(range(count))

        async def worker() -> None:
            for seq in seqs:
                await actor.step(Step(seq=seq, **FIELDS))

        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))

    async def _tell(self, actor: Any, count: int) -> None:
        for seq in range(count):
            await actor.step.tell(Step(seq=seq, **FIELDS))
        await actor.step(Step(seq=count, **FIELDS))

    async def _spawn(self, actor: Any, count: int) -> None:
        for _ in range(count):
            await xo.create_actor(Echo, address=self._address, uid=f"spawned-{next(self._names)}")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def _main(out: int) -> None:
    def say(value: dict[str, Any]) -> None:
        os.write(out, msgspec.json.encode(value) + b"\n")

    pool = await xo.create_actor_pool(f"127.0.0.1:{_free_port()}", n_process=1)
    address = pool.external_address
    inside = await xo.create_actor(Echo, address=address, uid="inside")
    other = xo.allocate_strategy.ProcessIndex(1)
    across = await xo.create_actor(Echo, address=address, uid="across", allocate_strategy=other)
    driver = Driver(inside, across, address)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    say({"version": xo.__version__})
    while line := await reader.readline():
        segment, count = line.split()
        say({"seconds": await driver.run(segment.decode(), int(count))})
    await pool.stop()


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # what xoscar prints is no answer of ours
    uvloop.run(_main(out))


if __name__ == "__main__":
    main()
