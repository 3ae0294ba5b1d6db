"""Where the satellites run: on the machines that join the job, and what no machine takes here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from gyre.actors import (
    Actor,
    ActorError,
    Ask,
    ChildSpec,
    Down,
    ProcessSpec,
    Ref,
    Restarted,
    SpawnFailed,
    Supervision,
    Supervisor,
    handles,
)
from gyre.cell.messages import Retire
from gyre.cell.store import StoreConfig

log = structlog.get_logger()

RESTARTS = 10
WINDOW_S = 600.0
RETIRE_TIMEOUT_S = 120.0


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine that wants to join must know: the job's name, the paths that it must see, and what its
    ranks will be."""

    name: str
    paths: tuple[Path, ...]
    threads_per_rank: int


class GetJobFacts(Ask[JobFacts], frozen=True, kw_only=True):
    """To the Satellites, before Join."""


class Join(Ask[tuple[int, ...]], frozen=True, kw_only=True):
    """To the Satellites: the machine of `node` takes up to `cells` cells, whose regions go to its
    `shm_folder`. Answers which it has been given so far."""

    node: Ref
    cells: int
    shm_folder: Path


class Leave(Ask[None], frozen=True, kw_only=True):
    """To the Satellites: the machine goes. Answered when its cells have handed over and are gone."""

    node: Ref


class Machine(msgspec.Struct, kw_only=True):
    """One that has joined. Its own rendezvous store keeps the cells' groups on it."""

    node: Ref
    room: int
    shm_folder: Path
    stores: Ref
    cells: dict[int, Ref] = {}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cell is to be: `machine` None is this one. `slot` counts the cells of a machine."""

    machine: Machine | None
    slot: int
    former_lives: int


class Satellites(Actor):
    """Deals cells 1 to `cells` - 1 out when `nodes` machines have joined: to those first, in the order in
    which they came, each as many as it takes. Restarts them where they are. The cells of a machine that
    leaves, or is lost, wait for the next that has room."""

    supervision = Supervision(max_restarts=RESTARTS, window_s=WINDOW_S)

    def __init__(
        self, facts: JobFacts, cells: int, nodes: int, logs: Path, spec: Callable[[int, Place], ProcessSpec]
    ) -> None:
        self._facts = facts
        self._waiting = list(range(1, cells))
        self._nodes = nodes
        self._logs = logs
        self._spec = spec
        self._dealt = False
        self._machines: dict[str, Machine] = {}
        self._lives: dict[int, int] = {}

    async def started(self) -> None:
        if self._nodes > 0:
            log.info("waiting_for_nodes", nodes=self._nodes)
        await self._deal()

    @handles(GetJobFacts)
    async def facts(self, message: GetJobFacts) -> JobFacts:
        return self._facts

    # --- machines come and go ---------------------------------------------------------------------

    @handles(Join)
    async def join(self, message: Join) -> tuple[int, ...]:
        node = message.node
        if node.node_id in self._machines:
            raise ValueError(f"{node.name} has joined already")
        stores = await self._start_stores(node)
        machine = Machine(node=node, room=message.cells, shm_folder=message.shm_folder, stores=stores)
        self._machines[node.node_id] = machine
        self.context.monitor(node)
        log.info("node_joined", node=node.name, endpoint=node.endpoint, takes=message.cells)
        await self._deal()
        return tuple(machine.cells)

    @handles(Leave)
    async def leave(self, message: Leave) -> None:
        machine = self._machines.pop(message.node.node_id, None)
        if machine is None:
            return
        log.info("node_leaves", node=machine.node.name, cells=sorted(machine.cells))
        self.context.demonitor(machine.node)
        await asyncio.gather(*(self._retire(ref) for ref in machine.cells.values()))
        await self._clear(machine)
        log.info("node_left", node=machine.node.name)

    @handles(Down)
    async def down(self, message: Down) -> None:
        """A machine is lost, and its cells with it. Processes are restarted without us."""
        machine = self._machines.get(message.ref.node_id)
        if machine is None or machine.node != message.ref:
            return
        del self._machines[message.ref.node_id]
        log.warning(
            "node_lost", node=machine.node.name, reason=message.reason.brief, cells=sorted(machine.cells)
        )
        await self._clear(machine)

    @handles(Restarted)
    async def restarted(self, message: Restarted) -> None:
        for machine in self._machines.values():
            for cell, ref in machine.cells.items():
                if ref.name == message.ref.name:
                    machine.cells[cell] = message.ref
                    self.context.monitor(message.ref)

    async def _retire(self, cell: Ref) -> None:
        try:
            await cell.ask(Retire(), timeout_s=RETIRE_TIMEOUT_S)
        except ActorError as error:
            log.warning("cell_not_retired", cell=cell.name, reason=str(error))

    async def _clear(self, machine: Machine) -> None:
        """Its cells wait for another."""
        for cell, ref in machine.cells.items():
            await self.context.stop_child(ref)
            self._lives[cell] = ref.incarnation
        await self.context.stop_child(machine.stores)
        self._waiting = sorted([*self._waiting, *machine.cells])
        machine.cells.clear()
        await self._deal()

    # --- cells are dealt --------------------------------------------------------------------------

    async def _deal(self) -> None:
        if not self._dealt and len(self._machines) < self._nodes:
            return
        for machine in self._machines.values():
            while self._waiting and len(machine.cells) < machine.room:
                if not await self._place(self._waiting[0], machine):
                    break
                del self._waiting[0]
        if not self._dealt:
            self._dealt = True
            for cell in self._waiting:
                await self.context.spawn(self._spec(cell, Place(machine=None, slot=cell, former_lives=0)))
            self._waiting = []

    async def _place(self, cell: int, machine: Machine) -> bool:
        place = Place(machine=machine, slot=len(machine.cells), former_lives=self._lives.get(cell, 0))
        try:
            ref = await self.context.spawn(self._spec(cell, place))
        except SpawnFailed as error:
            log.warning("cell_not_placed", cell=cell, node=machine.node.name, reason=str(error.reason))
            return False
        # Monitored, so that its loss with the machine is no crash of ours.
        self.context.monitor(ref)
        machine.cells[cell] = ref
        log.info("cell_placed", cell=cell, node=machine.node.name)
        return True

    async def _start_stores(self, node: Ref) -> Ref:
        store = ProcessSpec(
            name="store",
            actor="gyre.cell.store:StoreActor",
            config=StoreConfig(),
            log_path=self._logs / f"store-{node.node_id}.log",
            node=node,
        )
        spec = ChildSpec(
            name=f"stores-{node.node_id}",
            start=lambda: Supervisor([store], max_restarts=RESTARTS),
            restart="temporary",
        )
        stores = await self.context.spawn(spec)
        self.context.monitor(stores)
        return stores
