"""A simulated job: a root, three cells in processes of their own, a client on another machine, and what can
happen to them. Scenarios for `python -m gyre.actors.testing tests.actors.testing.job:chaos --seed N`."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from gyre.actors import (
    Actor,
    ActorError,
    Ask,
    AwaitChild,
    ChildSpec,
    Down,
    ExitReason,
    Node,
    NodeFailed,
    ProcessSpec,
    Ref,
    SpawnFailed,
    Stream,
    Supervisor,
    Tell,
    handles,
)
from gyre.actors.testing import Host, Simulation, Violated, Weather

CELLS = 3
CALLS = 40
TIMEOUT_S = 2.0
# An answer to a deadline may come a tick late, and a handler's own cancelling takes a turn.
LATE_S = 0.05


class Entry(Tell, frozen=True, kw_only=True):
    """Of one writer to the ledger, numbered."""

    writer: str
    number: int


class Double(Ask[int], frozen=True, kw_only=True):
    number: int


class Ponder(Ask[int], frozen=True, kw_only=True):
    """Takes its time."""

    seconds: float


class Enter(Ask[int], frozen=True, kw_only=True):
    """The cell asks the ledger for its size."""


class Size(Ask[int], frozen=True, kw_only=True):
    pass


class Count(Stream[int], frozen=True, kw_only=True):
    to: int


class Break(Tell, frozen=True, kw_only=True):
    pass


class Ledger(Actor):
    """Each writer's numbers must only grow: per-pair order, nothing twice."""

    def __init__(self) -> None:
        self.entries: dict[str, int] = {}
        self.size = 0
        self.disorder: list[str] = []

    @handles(Entry)
    async def entry(self, message: Entry) -> None:
        before = self.entries.get(message.writer, -1)
        if message.number <= before:
            self.disorder.append(f"{message.writer}: {message.number} after {before}")
        self.entries[message.writer] = message.number
        self.size += 1

    @handles(Size)
    async def count(self, message: Size) -> int:
        return self.size


class CellConfig(msgspec.Struct, frozen=True, kw_only=True):
    ledger: Ref


class Cell(Actor):
    def __init__(self, config: CellConfig) -> None:
        self.ledger = config.ledger
        self.written = 0

    @handles(Double)
    async def double(self, message: Double) -> int:
        writer = f"{self.context.name}#{self.context.incarnation}"
        await self.ledger.tell(Entry(writer=writer, number=self.written))
        self.written += 1
        return 2 * message.number

    @handles(Ponder, concurrent=True)
    async def ponder(self, message: Ponder) -> int:
        await asyncio.sleep(message.seconds)
        return 1

    @handles(Enter)
    async def enter(self, message: Enter) -> int:
        return await self.ledger.ask(Size())

    @handles(Count)
    async def count(self, message: Count) -> AsyncIterator[int]:
        for number in range(message.to):
            yield number

    @handles(Break)
    async def broken(self, message: Break) -> None:
        raise RuntimeError("broken")


class Watcher(Actor):
    """Monitors cells; each death is told once."""

    def __init__(self) -> None:
        self.downs: Counter[Ref] = Counter()

    @handles(Down)
    async def down(self, message: Down) -> None:
        self.downs[message.ref] += 1


class Job:
    """A root with the ledger, the watcher and supervised cells; clients at the root and on the other machine.
    Each client makes CALLS calls and counts what became of them."""

    def __init__(self, sim: Simulation, calls: int = CALLS) -> None:
        self.sim = sim
        self.calls = calls
        self.nodes: dict[str, Node] = {}
        self.root = sim.host("root")
        self.other = sim.host("other")
        self.ledger = Ledger()
        self.watcher = Watcher()
        self.outcomes: Counter[str] = Counter()
        self.open_asks: Counter[Host] = Counter()
        self._up: asyncio.Future[list[tuple[Ref, str]]] = sim.loop.create_future()
        self._clients_done = asyncio.Event()

    async def run(self, faults: Callable[[Job], Coroutine[Any, Any, None]] | None = None) -> None:
        """All of it, under `faults`, until it has ended; then what must hold in the end is checked."""
        sim = self.sim
        chaos = asyncio.ensure_future(faults(self)) if faults is not None else None
        root = sim.start(self.root, self._root())
        async with asyncio.timeout(900.0):
            await self._until(self.root, self._up, root)
            if self._up.done():
                client = sim.start(self.other, self._elsewhere())
                await self._until(self.other, client)
            self._clients_done.set()
            await self._until(self.root, root)
            if chaos is not None:
                chaos.cancel()
                await asyncio.wait([chaos])
            await asyncio.sleep(60.0)  # whoever was cut off has noticed by now
        self._judge()

    def _judge(self) -> None:
        sim = self.sim
        faults = self.ledger.disorder + [
            f"{ref.label} died {count} times" for ref, count in self.watcher.downs.items() if count != 1
        ]
        faults += [f"{n} asks open at {host.name}" for host, n in self.open_asks.items() if n and host.alive]
        if faults:
            raise Violated("; ".join(faults))
        sim.assert_quiet()

    async def _until(self, host: Host, *futures: asyncio.Future[Any]) -> None:
        """Until one is done, or their host is dead."""
        while host.alive and not any(future.done() for future in futures):
            await asyncio.wait(futures, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        for future in futures:
            if future.done():
                future.result()

    # --- the root ---------------------------------------------------------------------------------

    async def _root(self) -> None:
        with contextlib.suppress(NodeFailed, SpawnFailed):  # what was killed while it started
            async with self.sim.node("root", self.root) as node:
                self.nodes["root"] = node
                endpoint = await node.listen()
                spec = ChildSpec(name="ledger", start=lambda: self.ledger, mailbox=16)
                ledger = await node.spawn(spec)
                await node.spawn(ChildSpec(name="watcher", start=lambda: self.watcher))
                cells = await node.spawn(ChildSpec(name="cells", start=lambda: _cells(ledger)))
                clients = [self._client(f"root-{index}", self.root, cells, ledger) for index in range(2)]
                self._up.set_result([(ref, endpoint) for ref in (cells, ledger)])
                await asyncio.gather(*clients)
                await self._clients_done.wait()

    async def _elsewhere(self) -> None:
        async with self.sim.node("other", self.other) as node:
            cells, ledger = [
                node.bind(ref.node_id, endpoint, ref.id, ref.name, ref.incarnation)
                for ref, endpoint in self._up.result()
            ]
            await self._client("other", self.other, cells, ledger)

    # --- clients ----------------------------------------------------------------------------------

    async def _client(self, name: str, host: Host, cells: Ref, ledger: Ref) -> None:
        rng = random.Random(f"{self.sim.seed}/{name}")
        for number in range(self.calls):
            await asyncio.sleep(rng.random() * 0.2)
            began = self.sim.loop.time()
            self.open_asks[host] += 1
            try:
                cell = await cells.ask(AwaitChild(name=f"cell-{rng.randrange(CELLS)}"), timeout_s=TIMEOUT_S)
                await self._call(rng, cell, ledger, Entry(writer=name, number=number))
                self.outcomes["answered"] += 1
            except ActorError as error:
                self.outcomes[type(error).__name__] += 1
            except TimeoutError:
                self.outcomes["cancelled"] += 1
            self.open_asks[host] -= 1
            if self.sim.loop.time() - began > 2 * TIMEOUT_S + LATE_S:
                self.sim.violate(f"{name}: a call took {self.sim.loop.time() - began:.3f} s")

    async def _call(self, rng: random.Random, cell: Ref, ledger: Ref, entry: Entry) -> None:
        match rng.randrange(6):
            case 0:
                assert await cell.ask(Double(number=entry.number), timeout_s=TIMEOUT_S) == 2 * entry.number
            case 1:
                await cell.ask(Ponder(seconds=rng.random()), timeout_s=rng.random())
            case 2:
                assert await cell.ask(Enter(), timeout_s=TIMEOUT_S) >= 0
            case 3:
                await ledger.tell(entry, timeout_s=TIMEOUT_S)
            case 4:
                async with asyncio.timeout(TIMEOUT_S):
                    numbers = [number async for number in cell.stream(Count(to=100))]
                assert numbers == [*range(100)]
            case 5:
                async with asyncio.timeout(rng.random() * 0.01):
                    await cell.ask(Ponder(seconds=1.0), timeout_s=TIMEOUT_S)


def _cells(ledger: Ref) -> Supervisor:
    specs = [
        ProcessSpec(
            name=f"cell-{index}", actor="tests.actors.testing.job:Cell", config=CellConfig(ledger=ledger)
        )
        for index in range(CELLS)
    ]
    return Supervisor(specs, max_restarts=1000)


async def calm(sim: Simulation) -> None:
    """Nothing goes wrong: every call is answered, or cancelled by who made it."""
    job = Job(sim)
    await job.run()
    assert set(job.outcomes) <= {"answered", "cancelled", "AskTimeout"}, job.outcomes


async def chaos(sim: Simulation) -> None:
    """Processes die, actors crash, connections break, the network is cut and heals."""
    await Job(sim).run(_chaos)


async def _chaos(job: Job) -> None:
    sim, rng = job.sim, job.sim.rng
    while True:
        await asyncio.sleep(rng.random())
        cells = [host for host in sim.hosts if host.alive and host.name.startswith("cell")]
        if not cells:
            continue
        cell = rng.choice(cells)
        match rng.randrange(6):
            case 0:
                sim.kill(cell)
            case 1:
                sim.network.break_connections(cell)
            case 2:
                sim.network.break_connections(job.other)
            case 3:
                far = job.other if rng.random() < 0.5 else cell
                sim.network.partition(job.root, far)
                await asyncio.sleep(rng.random() * 30.0)
                sim.network.heal(job.root, far)
            case 4:
                sim.network.partition(job.other, cell)
                await asyncio.sleep(rng.random() * 5.0)
                sim.network.heal(job.other, cell)
            case 5:
                sim.power_off(cell)


async def storm(sim: Simulation) -> None:
    """The same in a network that is slow, doubles frames and has readers that do not keep up."""
    sim.network.weather = Weather(latency_s=(0.001, 0.2), slow_readers=0.3, slow_s=0.01, duplicates=0.2)
    await Job(sim).run(_chaos)


async def short(sim: Simulation) -> None:
    """A few calls, nothing goes wrong."""
    await Job(sim, calls=4).run()


def killed(victim: str, step: int) -> Callable[[Simulation], Coroutine[Any, Any, None]]:
    """`short`, where a process, a node or an actor is killed after so many steps."""

    async def scenario(sim: Simulation) -> None:
        made = Job(sim, calls=4)
        check = sim.loop.after_step

        def after_step(host: Host | None) -> None:
            if sim.loop.steps >= step:
                sim.loop.after_step = check
                _kill(made, victim)
            check(host)

        sim.loop.after_step = after_step
        await made.run()

    return scenario


def _kill(made: Job, victim: str) -> None:
    hosts = [host for host in made.sim.hosts if host.alive and host.name.partition(".")[0] == victim]
    if hosts:
        made.sim.kill(hosts[0])
        return
    node = made.nodes.get("root")
    ref = node.lookup(victim) if node is not None else None
    life = node.lives.get(ref.id) if node is not None and ref is not None else None
    if life is not None:
        life.crash(ExitReason(kind="error", message="killed"))


class Sleepy(Actor):
    @handles(Ponder)
    async def ponder(self, message: Ponder) -> int:
        await asyncio.sleep(message.seconds)
        return 1


def slow_spec() -> ChildSpec:
    return ChildSpec(name="sleepy", start=Sleepy)


async def prompt(sim: Simulation) -> None:
    """A process is killed under an ask: who asked learns it at once, not by its deadline."""
    root = sim.host("root")

    async def main() -> None:
        async with sim.node("root", root) as node:
            spec = ProcessSpec(name="cell", actor="tests.actors.testing.job:Sleepy", restart="temporary")
            watcher = Watcher()
            cell = await node.spawn(spec)
            watching = await node.spawn(ChildSpec(name="watcher", start=lambda: watcher))
            node.lives[watching.id].monitor(cell)
            (host,) = [host for host in sim.hosts if host.name.startswith("cell")]
            sim.loop.call_later(1.0 + sim.rng.random(), sim.kill, host)
            try:
                await cell.ask(Ponder(seconds=1e3), timeout_s=100.0)
            except ActorError:
                if sim.loop.time() > 3.0:
                    raise Violated(f"an ask that lost its peer ended at {sim.loop.time():.3f} s") from None

    await sim.start(root, main())


async def flood(sim: Simulation) -> None:
    """One writer, far more messages than may be under way: all arrive, in order."""
    made = Ledger()
    root, other = sim.host("root"), sim.host("other")
    done = asyncio.Event()
    ready: asyncio.Future[tuple[Ref, str]] = sim.loop.create_future()

    async def reads() -> None:
        async with sim.node("root", root) as node:
            ledger = await node.spawn(ChildSpec(name="ledger", start=lambda: made))
            ready.set_result((ledger, await node.listen()))
            await done.wait()

    async def writes() -> None:
        async with sim.node("other", other) as node:
            ref, endpoint = await ready
            ledger = node.bind(ref.node_id, endpoint, ref.id, ref.name, ref.incarnation)
            for number in range(4000):
                await ledger.tell(Entry(writer="other", number=number), timeout_s=5.0)
            assert await ledger.ask(Size()) == 4000

    reader = sim.start(root, reads())
    await sim.start(other, writes())
    done.set()
    await reader
    assert made.disorder == []
