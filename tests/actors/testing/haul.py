"""Blobs under faults: a depot, haulers on two other hosts, and a network that breaks. Scenarios for
`python -m gyre.actors.testing tests.actors.testing.haul:haul --seed N`."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from gyre.actors import Actor, ActorError, Ask, Blob, ChildSpec, Node, Ref, Stream, Tell, handles
from gyre.actors.bulk import incoming
from gyre.actors.testing import Host, Simulation, Violated, Weather
from tests.actors.zoo_blobs import pattern

HOSTS = ("depot", "north", "south")
HAULERS = 3
HAULS = 30
TIMEOUT_S = 2.0
# Larger than what travels in its message's frame; several pieces; none.
SIZES = (0, 10, 70_000, 300_000, 600_000)
UNDER_WAY_BYTES = 800_000

# What became of the hauls, of all runs.
HAPPENED: Counter[str] = Counter()


class Crate(Tell, frozen=True, kw_only=True):
    writer: str
    number: int
    blob: Blob | None


class Weigh(Ask[int], frozen=True, kw_only=True):
    blob: Blob


class Return(Ask[Blob], frozen=True, kw_only=True):
    blob: Blob
    after_s: float


class Pour(Stream[Blob], frozen=True, kw_only=True):
    sizes: tuple[int, ...]


class Depot(Actor):
    """Each writer's crates must come in order, none twice, each as it was sent."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.crates: dict[str, list[int]] = {}

    @handles(Crate)
    async def crate(self, message: Crate) -> None:
        numbers = self.crates.setdefault(message.writer, [-1])
        if message.number <= numbers[-1]:
            self.sim.violate(f"{message.writer}: crate {message.number} after {numbers[-1]}")
        if message.blob is not None and message.blob.buffer != pattern(message.blob.nbytes):
            self.sim.violate(f"{message.writer}: crate {message.number} was changed on its way")
        numbers.append(message.number)
        await asyncio.sleep(0.01)

    @handles(Weigh)
    async def weigh(self, message: Weigh) -> int:
        return message.blob.nbytes

    @handles(Return, concurrent=True)
    async def give_back(self, message: Return) -> Blob:
        await asyncio.sleep(message.after_s)
        return message.blob

    @handles(Pour)
    async def pour(self, message: Pour) -> AsyncIterator[Blob]:
        for size in message.sizes:
            yield Blob(pattern(size))


class Haul:
    def __init__(self, sim: Simulation, *, calm: bool = False) -> None:
        self.sim = sim
        self.calm = calm
        self.hosts = [sim.host(name) for name in HOSTS]
        self.nodes: list[Node] = []
        self.depot = Depot(sim)
        self.sent: dict[str, list[int]] = {}
        self._up: asyncio.Future[tuple[Ref, str]] = sim.loop.create_future()
        self._hauled = {host: sim.loop.create_future() for host in self.hosts}
        self._over = asyncio.Event()

    async def run(self) -> None:
        sim = self.sim
        with _small_window():
            tasks = [sim.start(self.hosts[0], self._keep())]
            haulers = [sim.start(host, self._haul(host)) for host in self.hosts[1:]]
            chaos = None if self.calm else asyncio.ensure_future(self._break())
            async with asyncio.timeout(900.0):
                for host, hauler in zip(self.hosts[1:], haulers, strict=True):
                    either: list[asyncio.Future[None]] = [self._hauled[host], hauler]
                    while host.alive and not any(future.done() for future in either):
                        await asyncio.wait(either, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if chaos is not None:
                    chaos.cancel()
                await asyncio.sleep(60.0)
                self._judge()
                self._over.set()
                await asyncio.wait(
                    [
                        *tasks,
                        *(task for task, host in zip(haulers, self.hosts[1:], strict=True) if host.alive),
                    ]
                )
            for task in (*tasks, *haulers):
                if task.done():
                    task.result()
        sim.assert_quiet()

    def _judge(self) -> None:
        for writer, sent in self.sent.items():
            came = self.depot.crates.get(writer, [-1])[1:]
            if not set(came) <= set(sent):
                raise Violated(
                    f"{writer}: {sorted({*came} - {*sent})} came, of which it was told that they did not"
                )
            if self.calm and came != sent:
                raise Violated(f"{writer}: {came} came of {sent}")
        for node in self.nodes:
            if not self.hosts[HOSTS.index(node.name)].alive:
                continue
            for link in node.links.all():
                coming, going = link.freight.incoming, link.freight.outgoing
                if coming.lanes or coming._coming or coming._loads or going._cargo or going._written:
                    raise Violated(f"{node.name} still has blobs on their way")

    async def _keep(self) -> None:
        async with self.sim.node("depot", self.hosts[0]) as node:
            self.nodes.append(node)
            ref = await node.spawn(ChildSpec(name="depot", start=lambda: self.depot, mailbox=16))
            self._up.set_result((ref, await node.listen()))
            await self._over.wait()

    async def _haul(self, host: Host) -> None:
        async with self.sim.node(host.name, host) as node:
            self.nodes.append(node)
            await node.listen()
            ref, endpoint = await self._up
            depot = node.bind(ref.node_id, endpoint, ref.id, ref.name, ref.incarnation)
            await asyncio.gather(*(self._one(f"{host.name}-{index}", depot) for index in range(HAULERS)))
            self._hauled[host].set_result(None)
            await self._over.wait()

    async def _one(self, name: str, depot: Ref) -> None:
        rng = random.Random(f"{self.sim.seed}/{name}")
        sent = self.sent[name] = []
        for number in range(HAULS):
            await asyncio.sleep(rng.random() * 0.3)
            began = self.sim.loop.time()
            try:
                await self._call(rng, depot, name, number, sent)
                HAPPENED["done"] += 1
            except ActorError as error:
                HAPPENED[type(error).__name__] += 1
            except TimeoutError:
                HAPPENED["cancelled"] += 1
            if self.sim.loop.time() - began > 2 * TIMEOUT_S:
                self.sim.violate(f"{name}: a call took {self.sim.loop.time() - began:.3f} s")

    async def _call(self, rng: random.Random, depot: Ref, name: str, number: int, sent: list[int]) -> None:
        size = rng.choice(SIZES)
        blob = Blob(pattern(size))
        match rng.randrange(6):
            case 0:
                await depot.tell(Crate(writer=name, number=2 * number, blob=blob), timeout_s=TIMEOUT_S)
                sent.append(2 * number)
            case 1 if self.calm:
                # One that has nothing to wait for is sent while the blob of the other is under way.
                async with asyncio.TaskGroup() as group:
                    for at in (blob, None):
                        crate = Crate(writer=name, number=2 * number + (at is None), blob=at)
                        group.create_task(depot.tell(crate))
                        sent.append(crate.number)
            case 1:
                await depot.tell(Crate(writer=name, number=2 * number, blob=None), timeout_s=TIMEOUT_S)
                sent.append(2 * number)
            case 2:
                assert await depot.ask(Weigh(blob=blob), timeout_s=TIMEOUT_S) == size
            case 3:
                back = await depot.ask(Return(blob=blob, after_s=rng.random() * 0.1), timeout_s=TIMEOUT_S)
                if back.buffer != pattern(size):
                    self.sim.violate(f"{name}: {number} came back changed")
            case 4:
                async with asyncio.timeout(rng.random() * 0.1):
                    await depot.ask(Return(blob=blob, after_s=0.0), timeout_s=TIMEOUT_S)
            case 5:
                await self._drink(rng, depot)

    async def _drink(self, rng: random.Random, depot: Ref) -> None:
        sizes = tuple(rng.choice(SIZES) for _ in range(6))
        upto = rng.randrange(7)
        async with asyncio.timeout(TIMEOUT_S), contextlib.aclosing(depot.stream(Pour(sizes=sizes))) as items:
            got = 0
            async for item in items:
                if item.buffer != pattern(sizes[got]):
                    self.sim.violate(f"item {got} of a stream is another")
                got += 1
                if got == upto:
                    break

    async def _break(self) -> None:
        sim, rng = self.sim, self.sim.rng
        depot, *others = self.hosts
        while True:
            await asyncio.sleep(rng.random() * 0.5)
            match rng.randrange(4):
                case 0:
                    sim.network.break_connections(rng.choice(self.hosts))
                case 1:
                    if channels := [*sim.network._channels]:
                        rng.choice(channels).close("connection reset")
                case 2:
                    other = rng.choice(others)
                    sim.network.partition(depot, other)
                    await asyncio.sleep(rng.random() * 30.0)
                    sim.network.heal(depot, other)
                case 3:
                    if rng.random() < 0.1:
                        HAPPENED["kill"] += others[-1].alive
                        sim.kill(others[-1])


@contextlib.contextmanager
def _small_window() -> Iterator[None]:
    """Blobs of a simulation are small, and what may be under way too."""
    before, incoming.UNDER_WAY_BYTES = incoming.UNDER_WAY_BYTES, UNDER_WAY_BYTES
    try:
        yield
    finally:
        incoming.UNDER_WAY_BYTES = before


async def calm(sim: Simulation) -> None:
    """Nothing breaks: all that was told has come."""
    await Haul(sim, calm=True).run()


async def haul(sim: Simulation) -> None:
    """Connections break, one by one too; the network is cut and heals."""
    await Haul(sim).run()


async def slow(sim: Simulation) -> None:
    """The same in a network that is slow."""
    sim.network.weather = Weather(latency_s=(0.001, 0.1), slow_readers=0.3, slow_s=0.005, duplicates=0.2)
    await Haul(sim).run()
