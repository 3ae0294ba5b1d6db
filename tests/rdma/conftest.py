"""Backends here, and processes that hold regions of the same kind."""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from gyre.rdma import Backend, RegionHandle, Registration
from tests.rdma.holder import Answer, Order, left
from tests.rdma.kinds import KINDS, make

collect_ignore = [] if os.environ.get("GYRE_TEST_DEVICE") == "cuda" else ["test_cuda_ipc.py"]

# Not the loop's own: its threads would be counted.
_READER = ThreadPoolExecutor(1)


class Process:
    """`holder.py`: regions of any kind."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rdma.holder", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()


class Holder:
    """The backend of one kind in such a process."""

    def __init__(self, process: Process, kind: str) -> None:
        self.process = process.process
        self._kind = kind
        self.address = ""

    async def start(self) -> None:
        self.address = (await self.ask("start")).text

    def tell(self, do: str, name: str = "", **more: object) -> None:
        assert self.process.stdin is not None
        order = msgspec.convert({"do": do, "kind": self._kind, "name": name, **more}, Order)
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self.process.stdin.flush()

    async def heard(self) -> Answer:
        assert self.process.stdout is not None
        line = await asyncio.get_running_loop().run_in_executor(_READER, self.process.stdout.readline)
        return msgspec.json.decode(line, type=Answer)

    async def ask(self, do: str, name: str = "", **more: object) -> Answer:
        self.tell(do, name, **more)
        return await self.heard()

    async def left(self) -> dict[str, int]:
        return msgspec.convert(ast.literal_eval((await self.ask("left")).text), dict[str, int])

    async def hold(self, name: str, nbytes: int, do: str = "allocate", **more: object) -> RegionHandle:
        answer = await self.ask(do, name, nbytes=nbytes, **more)
        assert answer.handle is not None
        return answer.handle

    async def clear(self) -> None:
        """It closes its regions, which waits for whoever is at them."""
        async with asyncio.timeout(10):
            await self.ask("clear")


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as parent:
        folder = Path(parent) / "regions"
        folder.mkdir(mode=0o700)
        yield folder


@pytest.fixture(scope="session")
def process(folder: Path) -> Iterator[Process]:
    process = Process(folder)
    yield process
    process.end()
    assert process.process.returncode == 0


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


_holders: dict[str, Holder] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(kind: str, folder: Path, process: Process) -> AsyncIterator[Backend]:
    """One here, with a holder there; at its end nothing of it is left."""
    if kind not in _holders:
        holder = Holder(process, kind)
        await holder.start()
        _holders[kind] = holder
        # What a library makes for itself it makes the first time.
        first = make(kind, folder)
        await first.start()
        await (await first.allocate("first", 4096)).close()
        await first.close()
    before = left(folder)
    backend = make(kind, folder)
    await backend.start()
    yield backend
    async with asyncio.timeout(10):
        await backend.close()
    await settled(folder, before)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest_asyncio.fixture(loop_scope="module")
async def holder(kind: str, backend: Backend) -> AsyncIterator[Holder]:
    yield _holders[kind]
    await _holders[kind].clear()


Local = Callable[..., Awaitable[Registration]]


@pytest_asyncio.fixture(loop_scope="module")
async def local(backend: Backend) -> AsyncIterator[Local]:
    """Makes memory here, and closes it, which waits for whoever is at it."""
    made: list[Registration] = []

    async def make(nbytes: int, way: str = "allocate") -> Registration:
        name = f"mine-{len(made)}"
        if way == "allocate":
            region = await backend.allocate(name, nbytes)
        else:
            region = await backend.register(name, bytearray(nbytes))
        made.append(region)
        return region

    yield make
    async with asyncio.timeout(10):
        for region in made:
            await region.close()


def within(now: dict[str, int], before: dict[str, int]) -> bool:
    return all(count <= before[what] for what, count in now.items())


async def settled(folder: Path, before: dict[str, int], within_s: float = 20.0) -> None:
    """No more than before. A thread that was joined is there a moment longer, and the other end of a
    connection too."""
    for _ in range(int(100 * within_s)):
        if within(left(folder), before):
            return
        await asyncio.sleep(0.01)
    assert left(folder) == before
