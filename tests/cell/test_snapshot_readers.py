"""Processes that read the core's snapshots and are killed at it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre.actors import ActorDied, ChildSpec, Node, ProcessSpec, Ref, handles
from gyre.cell.actor import CellActorConfig
from gyre.cell.messages import StepComplete
from gyre.cell.snapshots import MOST
from gyre.cell.worker_messages import CommitStep, Updated, WriteSnapshot
from gyre.loss import MicroStepStats
from gyre.rdma import Borrow, HeldRegions, RegionHandle, SharedMemory
from tests.cell.parts import cell_setup
from tests.cell.reader import Copy, GetPid, Map, ReaderConfig
from tests.cell.scripted import Ranks, ScriptedQueue
from tests.cell.test_actor import Cell
from tests.rdma.conftest import settled
from tests.rdma.holder import left

NBYTES = 64 * 2**20


class CoreCell(Cell):
    """Says when a snapshot is about to be copied; that takes as long as the gate is shut."""

    def __init__(self, config: CellActorConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks)
        self.lent = asyncio.Event()
        self.gate = threading.Event()
        self.gate.set()

    @handles(Borrow, concurrent=True)
    async def lend(self, message: Borrow) -> RegionHandle:
        lent = await super().lend(message)
        self._lending._thread._started().call_soon_threadsafe(self.gate.wait, 30.0)
        self.lent.set()
        return lent


class House:
    """A core, and readers in processes."""

    def __init__(self, node: Node, shm: Path, tmp_path: Path) -> None:
        self._node = node
        self._shm = shm
        self._here = tmp_path / "here"
        self._held = HeldRegions(SharedMemory(shm))
        self._setup = cell_setup(Path("model"), shm, tmp_path / "checkpoints")
        self._readers = 0
        self.core: CoreCell
        self._ref: Ref

    async def start(self) -> None:
        queue = await self._node.spawn(ChildSpec(name="queue", start=ScriptedQueue, restart="temporary"))
        answers = {
            WriteSnapshot: lambda m: self._write(m.version),
            CommitStep: lambda m: Updated(grad_norm=1.0, lr=0.1, region=self._write(m.version)),
        }
        config = CellActorConfig(
            setup=self._setup, cell=0, waterlevel=queue, queue=queue, stores=queue, core=None, lease_s=600.0
        )
        self.core = CoreCell(config, Ranks(1, answers))
        spec = ChildSpec(name="core", start=lambda: self.core, restart="temporary")
        self._ref = await self._node.spawn(spec)

    async def reader(self) -> Ref:
        self._readers += 1
        return await self.life(self._readers)

    async def life(self, number: int) -> Ref:
        """The next one of that reader."""
        config = ReaderConfig(cell=number, core=self._ref, shm=self._shm, here=self._here, nbytes=NBYTES)
        name = f"reader-{number}"
        spec = ProcessSpec(name=name, actor="tests.cell.reader:Reader", config=config, restart="temporary")
        return await self._node.spawn(spec)

    async def commit(self) -> int:
        core = self.core._core
        assert core is not None
        complete = StepComplete(step=core.step, executions=1, stats=MicroStepStats(), cells=(0,))
        async with asyncio.timeout(30.0):
            return await core.commit(complete)

    def publish(self) -> None:
        assert self.core._core is not None
        self.core._core.snapshots.publish()

    def live(self) -> set[str]:
        return {path.name for path in self._shm.iterdir() if path.name.startswith("w")}

    def _write(self, version: int) -> RegionHandle:
        with self._held.allocate(f"w{version}", NBYTES) as region:
            region.buffer[:4] = b"v%03d" % version
            return region.handle


@pytest.fixture
async def house(shm: Path, tmp_path: Path) -> AsyncIterator[House]:
    async with Node(name="test") as node:
        made = House(node, shm, tmp_path)
        await made.start()
        yield made


async def test_the_lease_of_a_killed_reader_ends_with_it(house: House) -> None:
    """No commit waits for it, though its lease would go on for minutes; its memory is used again."""
    reader = await house.reader()
    assert await reader.ask(Map(kind="published")) == b"v000"
    await house.commit()
    house.publish()
    await house.commit()
    assert house.live() == {"w0", "w1", "w2"}
    os.kill(await reader.ask(GetPid()), signal.SIGKILL)
    assert await house.commit() == 3
    assert house.live() == {"w1", "w3"}
    assert len(list(house._shm.iterdir())) == MOST


async def test_a_reader_that_is_killed_in_the_midst_of_a_copy_leaves_nothing(house: House) -> None:
    other = await house.reader()
    assert await other.ask(Copy(kind="training")) == 0  # all that stays is there from now on
    reader = await house.reader()
    pid = await reader.ask(GetPid())
    before = left(house._shm)
    house.core.lent.clear()
    house.core.gate.clear()
    copying = asyncio.create_task(reader.ask(Copy(kind="training")))
    await house.core.lent.wait()
    async with asyncio.timeout(30.0):
        # Until that is what is copied to.
        while (house._here / "spare-reader-2").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    house.core.gate.set()
    with pytest.raises(ActorDied):
        await copying
    await settled(house._shm, before)
    await house._node.stop(reader)  # it is dead, and its name free
    await house.life(2)
    assert {path.name for path in house._here.iterdir()} == {"spare-reader-1", "spare-reader-2"}
    for version in range(1, 5):
        assert await house.commit() == version
        house.publish()
    assert await other.ask(Copy(kind="published")) == 4
    assert house.live() == {"w4"}
