"""Backends here, and processes that hold regions of the same kind."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from gyre.rdma import Backend, RegionHandle
from tests.rdma.holder import Answer, Order
from tests.rdma.kinds import KINDS, make

# Not the loop's own: its threads would be counted.
_READER = ThreadPoolExecutor(1)


class Holder:
    """Another process, in `holder.py`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rdma.holder", kind, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address = ""

    async def met(self) -> str:
        self.address = (await self.heard()).text
        return self.address

    def tell(self, do: str, name: str = "", **more: object) -> None:
        assert self.process.stdin is not None
        order = msgspec.convert({"do": do, "name": name, **more}, Order)
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self.process.stdin.flush()

    async def heard(self) -> Answer:
        assert self.process.stdout is not None
        line = await asyncio.get_running_loop().run_in_executor(_READER, self.process.stdout.readline)
        return msgspec.json.decode(line, type=Answer)

    async def ask(self, do: str, name: str = "", **more: object) -> Answer:
        self.tell(do, name, **more)
        return await self.heard()

    async def hold(self, name: str, nbytes: int, do: str = "allocate", **more: object) -> RegionHandle:
        answer = await self.ask(do, name, nbytes=nbytes, **more)
        assert answer.handle is not None
        return answer.handle

    async def clear(self) -> None:
        """It closes its regions, which waits for whoever is at them."""
        async with asyncio.timeout(10):
            await self.ask("clear")

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


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as parent:
        yield Path(parent) / "regions"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def holders(folder: Path) -> Iterator[dict[str, Holder]]:
    """One of each kind, made when first asked for."""
    found: dict[str, Holder] = {}
    yield found
    for holder in found.values():
        holder.end()


@pytest.fixture
async def holder(kind: str, folder: Path, holders: dict[str, Holder]) -> AsyncIterator[Holder]:
    if kind not in holders:
        holders[kind] = Holder(kind, folder)
        await holders[kind].met()
    yield holders[kind]
    await holders[kind].clear()


@pytest.fixture
async def here(kind: str, folder: Path, holder: Holder) -> AsyncIterator[Backend]:
    """Leaves nothing behind."""
    await once(kind, folder)
    before = left(folder)
    backend = make(kind, folder)
    await backend.start()
    yield backend
    await backend.close()
    await holder.clear()
    await settled(folder, before)
    assert asyncio.all_tasks() == {asyncio.current_task()}


_seen: set[str] = set()


async def once(kind: str, folder: Path) -> None:
    """What a library makes for itself it makes the first time."""
    if kind not in _seen:
        _seen.add(kind)
        backend = make(kind, folder)
        await backend.start()
        await backend.allocate("first", 4096).close()
        await backend.close()
        _READER.submit(int).result()


async def settled(folder: Path, before: dict[str, int]) -> None:
    """A thread that was joined is there a moment longer, and the other end of a connection too."""
    for _ in range(100):
        if left(folder) == before:
            return
        await asyncio.sleep(0.01)
    assert left(folder) == before


def left(folder: Path) -> dict[str, int]:
    """What this process has: file descriptors, threads, and shared memory of all."""
    gc.collect()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(list(folder.iterdir())) if folder.exists() else 0,
    }
