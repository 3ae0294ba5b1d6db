"""A core and a satellite as a job runs them: processes, a real queue and journal."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from gyre.actors import Actor, ChildSpec, ExitReason, Node, ProcessSpec, Ref, Supervisor, handles
from gyre.cell.actor import CellActorConfig
from gyre.cell.messages import (
    CellUp,
    Claim,
    EnterRollout,
    EnterTrain,
    HandOver,
    Idle,
    Lease,
    RoleChanged,
    Stale,
    StepComplete,
)
from gyre.cell.store import StoreActor, StoreConfig
from gyre.cell.worker_messages import CellSetup
from gyre.schedule.messages import MicroStepsReady, StepDone
from gyre.trajectory.journal import Journal
from gyre.trajectory.queue import QueueConfig
from gyre.trajectory.queue_actor import MicroStepQueue
from tests.cell.witness import Witness


class Waterlevel(Actor):
    """Takes what cells and the queue tell the WaterlevelActor, and decides nothing."""

    def __init__(self) -> None:
        self.up: dict[int, asyncio.Future[CellUp]] = {
            cell: asyncio.get_running_loop().create_future() for cell in range(2)
        }
        self.done: asyncio.Future[StepDone] = asyncio.get_running_loop().create_future()

    @handles(CellUp)
    async def cell_up(self, message: CellUp) -> None:
        self.up[message.cell].set_result(message)

    @handles(StepDone)
    async def step_done(self, message: StepDone) -> None:
        self.done.set_result(message)

    @handles(MicroStepsReady)
    async def micro_steps_ready(self, message: MicroStepsReady) -> None:
        pass


class Queue(MicroStepQueue):
    """Says who claims, so that work can come when both cells wait for it."""

    def __init__(self, config: QueueConfig, journal: Journal, waterlevel: Ref) -> None:
        super().__init__(config, journal, waterlevel)
        self.claimed: asyncio.Queue[int] = asyncio.Queue()

    @handles(Claim, concurrent=True)
    async def claim(self, message: Claim) -> Lease | HandOver | StepComplete | Idle | Stale:
        self.claimed.put_nowait(message.cell)
        return await super().claim(message)


class TwoCells:
    """Both are up."""

    def __init__(self, setup: CellSetup, node: Node, journal: Journal) -> None:
        self.setup = setup
        self.node = node
        self.waterlevel = Waterlevel()
        self._journal = journal
        self.cells: list[Ref] = []
        self.ups: list[CellUp] = []
        self.queue: Queue
        self.queue_ref: Ref

    async def start(self) -> None:
        waterlevel = await self.spawn("waterlevel", self.waterlevel)
        config = QueueConfig(groups_per_step=1)
        self.queue = Queue(config, self._journal, waterlevel)
        self.queue_ref = await self.spawn("queue", self.queue)
        # In this process: one less that imports torch.
        store = ChildSpec(name="store", start=lambda: StoreActor(StoreConfig()))
        stores = await self.spawn("stores", Supervisor([store]))
        for cell in range(2):
            cell_config = CellActorConfig(
                setup=self.setup,
                cell=cell,
                waterlevel=waterlevel,
                queue=self.queue_ref,
                stores=stores,
                core=self.cells[0] if cell else None,
            )
            spec = ProcessSpec(
                name=f"cell-{cell}",
                actor="gyre.cell.actor:CellActor",
                config=cell_config,
                log_path=self.setup.log_folder / f"cell-{cell}.log",
                restart="temporary",
                shutdown_s=20.0,
            )
            self.cells.append(await self.node.spawn(spec))
        self.ups = [await self.waterlevel.up[cell] for cell in range(2)]

    async def spawn(self, name: str, actor: Actor) -> Ref:
        return await self.node.spawn(ChildSpec(name=name, start=lambda: actor, restart="temporary"))

    async def witness(self, of: Ref) -> asyncio.Future[ExitReason]:
        witness = Witness(of)
        await self.spawn("witness", witness)
        return witness.reason

    async def change(self, order: EnterTrain | EnterRollout) -> list[RoleChanged]:
        return list(await asyncio.gather(*(cell.ask(order, timeout_s=60.0) for cell in self.cells)))


def process_of(log: str, folder: Path) -> int | None:
    """Which writes that log."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(entry / "fd" / "2") == str(folder / log):
                return int(entry.name)
    return None
