"""Where satellites run. The machines are nodes of this process; cells and stores are real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.actors import Actor, ChildSpec, Node, ProcessSpec, Ref, RemoteError, Tell, handles
from gyre.cell.messages import Retire
from gyre.cell.satellites import GetJobFacts, JobFacts, Join, Leave, Place, Satellites

TOKEN = b"the token that all these nodes hold"


class Up(Tell, frozen=True, kw_only=True):
    """A cell lives."""

    ref: Ref
    node: str
    far: bool
    slot: int
    pid: int


class Retired(Tell, frozen=True, kw_only=True):
    cell: str


class Witness(Actor):
    """What cells say, in order."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[Up | Retired] = asyncio.Queue()

    @handles(Up)
    async def up(self, message: Up) -> None:
        self.said.put_nowait(message)

    @handles(Retired)
    async def retired(self, message: Retired) -> None:
        self.said.put_nowait(message)


class CellConfig(msgspec.Struct, frozen=True, kw_only=True):
    witness: Ref
    far: bool
    slot: int
    fails: bool = False


class Cell(Actor):
    """Says that it lives, and when it is told to hand over."""

    def __init__(self, config: CellConfig) -> None:
        self._config = config

    async def started(self) -> None:
        config = self._config
        if config.fails:
            raise ValueError("no cell here")
        up = Up(
            ref=self.context.ref,
            node=self.context.node.name,
            far=config.far,
            slot=config.slot,
            pid=os.getpid(),
        )
        await config.witness.tell(up)

    @handles(Retire)
    async def retire(self, message: Retire) -> None:
        await self._config.witness.tell(Retired(cell=self.context.name))


class Job:
    """A root with satellites, and machines that join it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.witness = Witness()
        self.root = Node("root", transport="tcp", token=TOKEN)
        self.fails_at = ""

    async def start(self, cells: int, nodes: int) -> None:
        witness = await self.root.spawn(ChildSpec(name="witness", start=lambda: self.witness))
        facts = JobFacts(name="job", paths=(self.folder,), threads_per_rank=1)

        def spec(cell: int, place: Place) -> ProcessSpec:
            machine = place.machine
            fails = machine is not None and machine.node.name == self.fails_at
            return ProcessSpec(
                name=f"cell-{cell}",
                actor="tests.cell.test_satellites:Cell",
                config=CellConfig(witness=witness, far=machine is not None, slot=place.slot, fails=fails),
                node=None if machine is None else machine.node,
                former_lives=place.former_lives,
            )

        satellites = ChildSpec(
            name="satellites", start=lambda: Satellites(facts, cells, nodes, self.folder, spec)
        )
        self.satellites = await self.root.spawn(satellites)

    async def join(self, machine: Node, cells: int = 1) -> tuple[int, ...]:
        satellites = await self.there(machine)
        return await satellites.ask(self.offer(machine, cells))

    def offer(self, machine: Node, cells: int = 1) -> Join:
        desk = machine.neighbours.desk()
        assert desk is not None
        return Join(node=desk.ref, cells=cells, shm_folder=self.folder)

    async def leave(self, machine: Node) -> None:
        desk = machine.neighbours.desk()
        assert desk is not None
        await (await self.there(machine)).ask(Leave(node=desk.ref))

    async def there(self, machine: Node) -> Ref:
        """The satellites, as the machine sees them."""
        satellites = await machine.find("satellites", at=await machine.reach(await self.root.listen()))
        assert satellites is not None
        return satellites

    async def up(self, count: int) -> dict[str, Up]:
        """The next cells that live."""
        ups = [await self.witness.said.get() for _ in range(count)]
        assert all(isinstance(up, Up) for up in ups)
        return {up.ref.name: up for up in ups if isinstance(up, Up)}


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    job = Job(tmp_path)
    async with job.root:
        yield job


def machine(name: str) -> Any:
    return Node(name, transport="tcp", token=TOKEN)


async def test_with_no_nodes_all_run_here(job: Job) -> None:
    await job.start(cells=3, nodes=0)
    ups = await job.up(2)
    assert {name: (up.far, up.slot) for name, up in ups.items()} == {
        "cell-1": (False, 1),
        "cell-2": (False, 2),
    }


async def test_machines_get_what_they_take_in_order_and_the_rest_runs_here(job: Job) -> None:
    await job.start(cells=5, nodes=2)
    assert (await job.satellites.ask(GetJobFacts())).name == "job"
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(machine("first"))
        second = await stack.enter_async_context(machine("second"))
        assert await job.join(first, cells=2) == ()
        assert await job.join(second) == (3,)
        ups = await job.up(4)
        placed = {name: (up.far, up.slot) for name, up in ups.items()}
        assert placed == {
            "cell-1": (True, 0),
            "cell-2": (True, 1),
            "cell-3": (True, 0),
            "cell-4": (False, 4),
        }
        assert len(first.processes.all()) == 3  # and its store
        assert len(second.processes.all()) == 2
        with pytest.raises(RemoteError, match="second has joined already"):
            await (await job.there(second)).ask(job.offer(second))
        await job.root.stop(job.satellites)


async def test_cells_of_a_machine_that_is_lost_wait_for_the_next(job: Job) -> None:
    await job.start(cells=2, nodes=1)
    async with machine("first") as first:
        await job.join(first)
        before = (await job.up(1))["cell-1"]
        first.kill()
    async with machine("second") as second:
        assert await job.join(second) == (1,)
        after = (await job.up(1))["cell-1"]
        assert (before.ref.incarnation, after.ref.incarnation) == (1, 2)
        await job.root.stop(job.satellites)


async def test_a_cell_that_dies_is_restarted_where_it_was(job: Job) -> None:
    await job.start(cells=2, nodes=1)
    async with machine("first") as first:
        await job.join(first)
        for life in (1, 2, 3):
            up = (await job.up(1))["cell-1"]
            assert (up.ref.incarnation, up.far) == (life, True)
            os.kill(up.pid, signal.SIGKILL)
        await job.up(1)
        await job.root.stop(job.satellites)


async def test_cells_of_a_machine_that_leaves_hand_over_first(job: Job) -> None:
    await job.start(cells=3, nodes=1)
    async with machine("first") as first:
        await job.join(first, cells=2)
        await job.up(2)
        await job.leave(first)
        retired = {(await job.witness.said.get()).cell for _ in range(2)}  # type: ignore[union-attr]
        assert retired == {"cell-1", "cell-2"}
        assert first.processes.all() == []
        async with machine("second") as second:
            assert await job.join(second) == (1,)
            await job.root.stop(job.satellites)


async def test_where_a_cell_cannot_start_it_is_not_placed(job: Job) -> None:
    job.fails_at = "bad"
    await job.start(cells=2, nodes=1)
    async with machine("bad") as bad:
        assert await job.join(bad) == ()
        await job.root.stop(job.satellites)
