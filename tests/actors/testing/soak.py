"""Hours of virtual time under faults: what is kept must not grow. A supervised tree and a client at one
machine, a client at another."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
from collections import Counter
from collections.abc import AsyncIterator

from gyre.actors import (
    Actor,
    ActorError,
    Ask,
    AwaitChild,
    ChildSpec,
    Down,
    ExitReason,
    Follow,
    Node,
    ProcessSpec,
    Ref,
    Restarted,
    Stream,
    Supervision,
    Supervisor,
    Tell,
    handles,
)
from gyre.actors.testing import Host, Simulation

WORKERS = ("a", "b", "p")
TIMEOUT_S = 3.0
# A host that was killed keeps what it held until the run is over: a simulation runs no `finally` for it.
OBJECTS_OF_A_KILLED_HOST = 12_000
OBJECTS = 6_000


class Echo(Ask[int], frozen=True, kw_only=True):
    number: int


class Note(Tell, frozen=True, kw_only=True):
    number: int


class Nap(Ask[int], frozen=True, kw_only=True):
    seconds: float


class Numbers(Stream[int], frozen=True, kw_only=True):
    count: int


class End(Tell, frozen=True, kw_only=True):
    crash: bool


class Tick(Tell, frozen=True, kw_only=True):
    pass


class Worker(Actor):
    async def started(self) -> None:
        self.context.tell_after(60.0, Tick())

    @handles(Tick)
    async def tick(self, message: Tick) -> None:
        self.context.tell_after(60.0, Tick())

    @handles(Echo)
    async def echo(self, message: Echo) -> int:
        return message.number

    @handles(Note)
    async def note(self, message: Note) -> None:
        await asyncio.sleep(0)

    @handles(Nap, concurrent=True)
    async def nap(self, message: Nap) -> int:
        await asyncio.sleep(message.seconds)
        return 1

    @handles(Numbers)
    async def numbers(self, message: Numbers) -> AsyncIterator[int]:
        for number in range(message.count):
            yield number

    @handles(End)
    async def end(self, message: End) -> None:
        if message.crash:
            raise RuntimeError("crash")
        self.context.stop()


class Visit(Ask[int], frozen=True, kw_only=True):
    worker: Ref
    top: Ref


class Visitor(Actor):
    """Lives for one visit: monitors, follows, asks, streams half, sets timers, starts a task, and is gone."""

    @handles(Down)
    async def down(self, message: Down) -> None:
        return

    @handles(Restarted)
    async def restarted(self, message: Restarted) -> None:
        return

    @handles(Tick)
    async def tick(self, message: Tick) -> None:
        return

    @handles(Visit)
    async def visit(self, message: Visit) -> int:
        self.context.monitor(message.worker)
        await message.top.tell(Follow(watcher=self.context.ref))
        self.context.tell_after(1000.0, Tick())
        self.context.run(asyncio.sleep(1000.0))
        async with contextlib.aclosing(message.worker.stream(Numbers(count=50))) as items:
            async for number in items:
                if number == 25:
                    break
        return await message.worker.ask(Echo(number=1), timeout_s=TIMEOUT_S)


class Soak:
    """`hours` of it. `samples` has, every tenth of them, what was kept: objects of Python, descriptors,
    what the nodes hold."""

    def __init__(self, sim: Simulation, hours: float) -> None:
        sim.max_steps = 10**12
        self.sim = sim
        self.hours = hours
        self.root, self.other = sim.host("root"), sim.host("other")
        self.nodes: dict[str, Node] = {}
        self.did: Counter[str] = Counter()
        self.killed = 0
        self.samples: list[dict[str, int]] = []
        self._top: asyncio.Future[tuple[Ref, str]] = sim.loop.create_future()
        self._over = asyncio.Event()

    async def run(self) -> None:
        sides = [self.sim.start(self.root, self._root()), self.sim.start(self.other, self._other())]
        chaos = asyncio.ensure_future(self._chaos())
        for _ in range(10):
            await asyncio.sleep(self.hours * 360.0)
            self.samples.append(self._sample())
            for side in sides:
                if side.done():
                    side.result()
        chaos.cancel()
        self._over.set()
        await asyncio.wait(sides)
        for side in sides:
            side.result()
        self.sim.assert_quiet()

    async def _root(self) -> None:
        async with self.sim.node("root", self.root) as node:
            self.nodes["root"] = node
            specs = [ChildSpec(name=name, start=Worker) for name in WORKERS[:2]]
            process = ProcessSpec(name="p", actor="tests.actors.testing.soak:Worker")
            top = await node.spawn(
                ChildSpec(name="top", start=lambda: Supervisor([*specs, process], max_restarts=10**6))
            )
            self._top.set_result((top, await node.listen()))
            await asyncio.gather(self._client("root", node, top), self._over.wait())

    async def _other(self) -> None:
        rules = Supervision(max_restarts=10**6)
        async with self.sim.node("other", self.other, supervision=rules) as node:
            self.nodes["other"] = node
            ref, endpoint = await self._top
            top = node.bind(ref.node_id, endpoint, ref.id, ref.name, ref.incarnation)
            await self._client("other", node, top)

    async def _client(self, name: str, node: Node, top: Ref) -> None:
        rng = random.Random(f"{self.sim.seed}/{name}")
        while not self._over.is_set():
            await asyncio.sleep(rng.random() * 20.0)
            try:
                worker = await top.ask(AwaitChild(name=rng.choice(WORKERS)), timeout_s=TIMEOUT_S)
                await self._call(rng, node, top, worker)
                self.did["answered"] += 1
            except (ActorError, TimeoutError) as error:
                self.did[type(error).__name__] += 1

    async def _call(self, rng: random.Random, node: Node, top: Ref, worker: Ref) -> None:
        match rng.randrange(7):
            case 0:
                await worker.ask(Echo(number=1), timeout_s=TIMEOUT_S)
            case 1:
                for number in range(20):
                    await worker.tell(Note(number=number), timeout_s=TIMEOUT_S)
            case 2:
                await worker.ask(Nap(seconds=rng.random()), timeout_s=rng.random())
            case 3:
                async with asyncio.timeout(rng.random() * 0.02):
                    await worker.ask(Nap(seconds=5.0), timeout_s=TIMEOUT_S)
            case 4:
                async with asyncio.timeout(TIMEOUT_S):
                    async for _ in worker.stream(Numbers(count=40)):
                        pass
            case 5:
                spec = ChildSpec(name=f"visitor-{rng.randrange(10**9)}", start=Visitor, restart="temporary")
                visitor = await node.spawn(spec)
                try:
                    await visitor.ask(Visit(worker=worker, top=top), timeout_s=TIMEOUT_S)
                finally:
                    await node.stop(visitor)
            case 6 if rng.random() < 0.1:
                await worker.tell(End(crash=rng.random() < 0.5))

    async def _chaos(self) -> None:
        sim, rng = self.sim, self.sim.rng
        while True:
            await asyncio.sleep(rng.random() * 600.0)
            processes = [host for host in sim.hosts[2:] if host.alive]
            fault = rng.randrange(24)
            self.did[f"fault {min(fault, 4)}"] += 1
            match fault:
                case 0 if processes:
                    self.killed += 1
                    sim.kill(processes[-1])
                case 1 | 2 | 3:
                    away: Host = rng.choice([self.other, *processes[-1:]])
                    sim.network.partition(self.root, away)
                    await asyncio.sleep(rng.random() * 60.0)
                    sim.network.heal(self.root, away)
                case _ if fault % 2:
                    sim.network.break_connections(rng.choice([self.other, *processes[-1:]]))
                case _:
                    life = rng.choice([*self.nodes["root"].lives.values()])
                    if life.ref.name in WORKERS:
                        life.crash(ExitReason(kind="error", message="out of the blue"))

    def _sample(self) -> dict[str, int]:
        gc.collect()
        kept = {"objects": len(gc.get_objects()), "descriptors": len(os.listdir("/proc/self/fd"))}
        for name, node in self.nodes.items():
            links = node.links.all()
            kept[f"{name} lives"] = len(node.lives)
            kept[f"{name} links"] = len(links)
            kept[f"{name} on links"] = sum(
                len(link.pending) + len(link.incoming) + len(link.flows) + len(link._watched)
                for link in links
            )
            kept[f"{name} deadlines"] = sum(len(slot) for slot in node.deadlines._slots.values())
            kept[f"{name} watchers"] = sum(len(life.watchers._tell or ()) for life in node.lives.values())
        kept["killed"] = self.killed
        return kept

    def grown(self) -> list[str]:
        """What was more in the end than it may be."""
        early, last = self.samples[2], self.samples[-1]
        allowed = OBJECTS + OBJECTS_OF_A_KILLED_HOST * (last["killed"] - early["killed"])
        faults = []
        if last["objects"] - early["objects"] > allowed:
            faults.append(f"{last['objects'] - early['objects']} objects more, {allowed} allowed")
        if last["descriptors"] > early["descriptors"]:
            faults.append(f"{last['descriptors']} descriptors, {early['descriptors']} before")
        most = {"lives": 8, "links": 6, "on links": 40, "deadlines": 20, "watchers": 6}
        for what, count in last.items():
            bound = most.get(what.partition(" ")[2])
            if bound is not None and count > bound:
                faults.append(f"{what}: {count}, {bound} allowed")
        return faults
