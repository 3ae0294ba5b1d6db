"""A simulated job with a process on another machine, and what may become of the two."""

from __future__ import annotations

import asyncio
from typing import Literal

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
    handles,
)
from gyre.actors.testing import Simulation, Violated
from gyre.actors.testing.loop import Host

# Four beats of five seconds and some, twice: for the connection to the process and that to its machine.
KNOWN_AFTER_S = 60.0
FATES = (
    "nothing",
    "machine killed",
    "machine off",
    "cut for good",
    "cut for a while",
    "root killed",
    "root off",
    "connections broken",
    "process killed",
    "machine leaves",
)
State = Literal["starting", "up", "failed", "lost"]


class Echo(Ask[int], frozen=True, kw_only=True):
    number: int


class Worker(Actor):
    @handles(Echo)
    async def echo(self, message: Echo) -> int:
        return message.number


class Keeper(Actor):
    """Keeps a worker on the machine as long as that is there."""

    def __init__(self, machine: Ref) -> None:
        self._machine = machine
        self.worker: Ref | None = None
        self.state: State = "starting"
        self.answered = 0

    async def started(self) -> None:
        self.context.monitor(self._machine)
        self.context.run(self._work())

    async def _work(self) -> None:
        actor = "tests.actors.testing.machines:Worker"
        try:
            self._up(await self.context.spawn(ProcessSpec(name="worker", actor=actor, node=self._machine)))
        except SpawnFailed:
            self.state = "failed"
            return
        number = 0
        while True:
            number += 1
            await asyncio.sleep(0.2)
            if self.worker is not None:
                await self._ask(self.worker, number)

    async def _ask(self, worker: Ref, number: int) -> None:
        try:
            if await worker.ask(Echo(number=number), timeout_s=5.0) != number:
                raise Violated("the answer is another ask's")
            self.answered = number
        except ActorError:
            pass  # it ended, which is what matters

    def _up(self, worker: Ref) -> None:
        self.worker = worker
        self.context.monitor(worker)
        if self.state == "starting":
            self.state = "up"

    @handles(Restarted)
    async def restarted(self, message: Restarted) -> None:
        self._up(message.ref)

    @handles(Down)
    async def down(self, message: Down) -> None:
        if message.ref != self._machine:
            return
        self.state = "lost"
        if self.worker is not None:
            await self.context.stop_child(self.worker)


class Machines:
    """One run: `fate` strikes at a moment that the seed says."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.fate = sim.rng.choice(FATES)
        self.root = sim.host("root")
        self.machine = sim.host("machine")
        self.keeper: Keeper | None = None
        self._leave = asyncio.Event()

    async def run(self) -> None:
        endpoint: asyncio.Future[str] = self.sim.loop.create_future()
        self.sim.start(self.machine, self._serve(endpoint))
        self.sim.start(self.root, self._keep(endpoint))
        await asyncio.sleep(self.sim.rng.random() * 2.0)
        await self._strike()
        await asyncio.sleep(KNOWN_AFTER_S)
        for fault in self._faults():
            raise Violated(f"after {self.fate!r}: {fault}")

    async def _serve(self, endpoint: asyncio.Future[str]) -> None:
        async with self.sim.node("machine", self.machine) as node:
            endpoint.set_result(await node.listen())
            await self._leave.wait()

    async def _keep(self, endpoint: asyncio.Future[str]) -> None:
        async with self.sim.node("root", self.root) as node:
            try:
                machine = await node.reach(await endpoint)
            except ActorError:
                return
            self.keeper = keeper = Keeper(machine)
            await node.spawn(ChildSpec(name="keeper", start=lambda: keeper))
            await asyncio.Event().wait()

    async def _strike(self) -> None:
        sim = self.sim
        match self.fate:
            case "machine killed":
                sim.kill(self.machine)
            case "machine off":
                sim.power_off(self.machine)
            case "cut for good" | "cut for a while":
                # The process is cut off with its machine.
                hosts = [self.machine, *self.workers()]
                for host in hosts:
                    sim.network.partition(self.root, host)
                if self.fate == "cut for a while":
                    await asyncio.sleep(sim.rng.random() * 40.0)
                    for host in hosts:
                        sim.network.heal(self.root, host)
            case "root killed":
                sim.kill(self.root)
            case "root off":
                sim.power_off(self.root)
            case "connections broken":
                sim.network.break_connections(self.machine)
            case "process killed":
                for host in self.workers():
                    sim.kill(host)
            case "machine leaves":
                self._leave.set()

    def workers(self) -> list[Host]:
        return [host for host in self.sim.hosts if host.alive and host.name.startswith("worker.")]

    def _faults(self) -> list[str]:
        """What must not be, long after."""
        living = [host.name for host in self.workers()]
        keeper = self.keeper
        if len(living) > 1:
            return [f"{living} live side by side"]
        if not self.root.alive:
            return [f"{living} outlive their parent"] if living else []
        if keeper is None:
            return []
        if keeper.state == "up":
            answered = keeper.answered >= KNOWN_AFTER_S / 2
            return [] if living and answered else [f"all is well, they say; {living} {keeper.answered}"]
        if living:
            return [f"{living} live, the keeper says {keeper.state}"]
        if keeper.state == "starting":
            return ["the keeper still waits for its worker"]
        return [] if self.fate != "nothing" else [f"nothing happened, the keeper says {keeper.state}"]


async def machines(sim: Simulation) -> None:
    await Machines(sim).run()
