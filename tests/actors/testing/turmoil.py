"""Trees of all strategies under faults of every kind: crashes by message, children that come and go, too many
restarts, killed and vanished processes, cuts, resets. Scenarios for
`python -m gyre.actors.testing tests.actors.testing.turmoil:turmoil --seed N`.

What must hold: a message is handled once at most, once where it was answered, by the life it was sent to, in
its writer's order; a stream has no gap and nothing twice; each Down comes once; nothing that shall live is
missing in the end. What must hold after each step is checked by the simulation itself."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

from gyre.actors import (
    Actor,
    ActorError,
    Ask,
    ChildSpec,
    Down,
    ExitReason,
    Node,
    ProcessSpec,
    Ref,
    Spec,
    Stream,
    Supervision,
    Supervisor,
    Tell,
    WhereIs,
    handles,
)
from gyre.actors.specs import Strategy
from gyre.actors.testing import Host, Simulation, Violated, Weather

STRATEGIES: tuple[Strategy, ...] = ("one_for_one", "rest_for_one", "one_for_all")
WORKERS = ("a", "b", "c")
PROCESS = "p"
CALLS = 20
TIMEOUT_S = 2.0
LATE_S = 0.05
QUIET_S = 70.0

# What the seeds so far came across: a test asserts that nothing of it was left out.
HAPPENED: Counter[str] = Counter()


class Record:
    """What workers did, by message. A simulation is one process: all of its hosts write into one."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.handled: Counter[int] = Counter()
        self.last: dict[tuple[int, str], int] = {}

    def take(self, actor: Actor, message: Note | Echo) -> None:
        ref = actor.context.ref
        self.handled[message.id] += 1
        if self.handled[message.id] > 1:
            self.sim.violate(f"message {message.id} was handled twice")
        if message.to != ref.id:
            self.sim.violate(f"{ref.label} got what was sent to another life")
        if self.last.get((ref.id, message.writer), -1) >= message.id:
            self.sim.violate(f"{ref.label}: {message.writer}'s message {message.id} came after a later one")
        self.last[ref.id, message.writer] = message.id


_records: list[Record] = []


class Note(Tell, frozen=True, kw_only=True):
    id: int
    to: int
    writer: str


class Echo(Ask[int], frozen=True, kw_only=True):
    id: int
    to: int
    writer: str


class Relay(Ask[int], frozen=True, kw_only=True):
    """The worker asks the next of `path`."""

    path: tuple[Ref, ...]


class Nap(Ask[int], frozen=True, kw_only=True):
    seconds: float


class Numbers(Stream[int], frozen=True, kw_only=True):
    count: int


class Crash(Tell, frozen=True, kw_only=True):
    pass


class Leave(Tell, frozen=True, kw_only=True):
    pass


class Tick(Tell, frozen=True, kw_only=True):
    number: int


class Worker(Actor):
    def __init__(self) -> None:
        self.ticks = 0

    async def started(self) -> None:
        self.context.tell_after(1.0, Tick(number=0))

    @handles(Tick)
    async def tick(self, message: Tick) -> None:
        if message.number != self.ticks:
            _records[-1].sim.violate(f"{self.context.ref.label}: tick {message.number} of another life")
        self.ticks += 1
        self.context.tell_after(1.0, Tick(number=self.ticks))

    @handles(Note)
    async def note(self, message: Note) -> None:
        _records[-1].take(self, message)

    @handles(Echo)
    async def echo(self, message: Echo) -> int:
        _records[-1].take(self, message)
        if message.id % 3 == 0:
            await asyncio.sleep(0.01)
        return message.id

    @handles(Relay)
    async def relay(self, message: Relay) -> int:
        if not message.path:
            return 1
        return 1 + await message.path[0].ask(Relay(path=message.path[1:]), timeout_s=TIMEOUT_S)

    @handles(Nap, concurrent=True)
    async def nap(self, message: Nap) -> int:
        await asyncio.sleep(message.seconds)
        return 1

    @handles(Numbers)
    async def numbers(self, message: Numbers) -> AsyncIterator[int]:
        for number in range(message.count):
            if number % 50 == 49:
                await asyncio.sleep(0.02)
            yield number

    @handles(Crash)
    async def crash(self, message: Crash) -> None:
        HAPPENED["crash"] += 1
        raise RuntimeError("crash")

    @handles(Leave)
    async def leave(self, message: Leave) -> None:
        HAPPENED["leave"] += 1
        self.context.stop()


class Hire(Ask[Ref], frozen=True, kw_only=True):
    name: str


class Fire(Ask[None], frozen=True, kw_only=True):
    ref: Ref


class Plant(Supervisor):
    """Three workers, one of them transient, and one in a process; and helpers that come and go, also while
    the others are being restarted."""

    def __init__(self, strategy: Strategy) -> None:
        specs: list[Spec] = [ChildSpec(name=name, start=Worker, shutdown_s=0.5) for name in WORKERS[:2]]
        specs.append(ProcessSpec(name=PROCESS, actor="tests.actors.testing.turmoil:Worker", shutdown_s=2.0))
        specs.append(ChildSpec(name=WORKERS[2], start=Worker, restart="transient", shutdown_s=0.5))
        super().__init__(specs, strategy, max_restarts=4, window_s=3.0)

    async def started(self) -> None:
        if self.context.incarnation > 1:
            HAPPENED["escalation"] += 1
        await super().started()

    @handles(Hire, concurrent=True)
    async def hire(self, message: Hire) -> Ref:
        ref = await self.context.spawn(ChildSpec(name=message.name, start=Worker, restart="temporary"))
        self.context.monitor(ref)
        HAPPENED["hire"] += 1
        return ref

    @handles(Fire, concurrent=True)
    async def fire(self, message: Fire) -> None:
        await self.context.stop_child(message.ref)
        HAPPENED["fire"] += 1


class See(Tell, frozen=True, kw_only=True):
    ref: Ref


class Watcher(Actor):
    def __init__(self) -> None:
        self.watched: dict[Ref, None] = {}
        self.downs: Counter[Ref] = Counter()

    @handles(See)
    async def see(self, message: See) -> None:
        if message.ref not in self.watched:
            self.watched[message.ref] = None
            self.context.monitor(message.ref)

    @handles(Down)
    async def down(self, message: Down) -> None:
        self.downs[message.ref] += 1
        HAPPENED[f"down {message.reason.kind}"] += 1


class Turmoil:
    """One run: the tree at `root`, clients at `root` and `other`, a watcher at each."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.record = Record(sim)
        self.root = sim.host("root")
        self.other = sim.host("other")
        self.nodes: dict[str, Node] = {}
        self.watchers = {"root": Watcher(), "other": Watcher()}
        self.known: list[Ref] = []
        self.plants: list[Ref] = []
        self.next_id = 0
        self._endpoint = ""
        self._up = asyncio.Event()
        self._done = asyncio.Event()
        self._judged = asyncio.Event()

    async def run(self) -> None:
        _records.append(self.record)
        sim = self.sim
        root = sim.start(self.root, self._root())
        other = sim.start(self.other, self._other())
        async with asyncio.timeout(900.0):
            await asyncio.wait([root, other], return_when=asyncio.FIRST_EXCEPTION)
            for task in (root, other):
                if task.done():
                    task.result()
        sim.assert_quiet()

    async def _root(self) -> None:
        rules = Supervision(max_restarts=10**6, window_s=1.0)
        async with self.sim.node("root", self.root, supervision=rules) as node:
            self.nodes["root"] = node
            self._endpoint = await node.listen()
            for strategy in STRATEGIES:
                self.plants.append(await node.spawn(plant_spec(strategy)))
            await self._with_watcher("root", node)
            self._up.set()
            chaos = asyncio.ensure_future(self._chaos())
            await asyncio.gather(*(self._client(f"root-{index}", node) for index in range(2)))
            await self._done.wait()
            chaos.cancel()
            await asyncio.wait([chaos])
            self._heal()
            await asyncio.sleep(QUIET_S)
            self._judge(node)
            self._judged.set()

    async def _other(self) -> None:
        async with self.sim.node("other", self.other) as node:
            await self._up.wait()
            self.nodes["other"] = node
            await self._with_watcher("other", node)
            await self._client("other", node)
            self._done.set()
            await self._judged.wait()

    async def _with_watcher(self, name: str, node: Node) -> None:
        watcher = self.watchers[name]
        await node.spawn(ChildSpec(name="watcher", start=lambda: watcher))

    def _carried(self, node: Node, ref: Ref) -> Ref:
        endpoint = self._endpoint if ref.node_id == self.nodes["root"].id else ref.endpoint
        return node.bind(ref.node_id, endpoint, ref.id, ref.name, ref.incarnation)

    # --- clients ----------------------------------------------------------------------------------

    async def _client(self, name: str, node: Node) -> None:
        rng = random.Random(f"{self.sim.seed}/{name}")
        watcher = node.lookup("watcher")
        assert watcher is not None
        for _ in range(CALLS):
            await asyncio.sleep(rng.random() * 0.15)
            began = self.sim.loop.time()
            try:
                worker = await self._worker(rng, node)
                if worker is None:
                    continue
                if rng.random() < 0.3:
                    await watcher.tell(See(ref=worker))
                await self._call(rng, name, node, worker)
                HAPPENED["answered"] += 1
            except ActorError as error:
                HAPPENED[type(error).__name__] += 1
            took = self.sim.loop.time() - began
            if took > 3 * TIMEOUT_S + LATE_S:
                self.sim.violate(f"{name}: a call took {took:.3f} s")

    async def _worker(self, rng: random.Random, node: Node) -> Ref | None:
        """A worker that lives, or, now and then, one of before."""
        if self.known and rng.random() < 0.2:
            return self._carried(node, rng.choice(self.known))
        plant = self._plant(rng, node)
        name = rng.choice((*WORKERS, PROCESS))
        found = await plant.ask(WhereIs(name=name), timeout_s=TIMEOUT_S)
        if found is not None:
            self.known.append(found)
        return found

    def _plant(self, rng: random.Random, node: Node) -> Ref:
        """As it is now: a name service would say."""
        index = rng.randrange(len(STRATEGIES))
        living = self.nodes["root"].lookup(STRATEGIES[index])
        if living is not None:
            self.plants[index] = living
        return self._carried(node, self.plants[index])

    async def _call(self, rng: random.Random, name: str, node: Node, worker: Ref) -> None:
        match rng.randrange(9):
            case 0 | 1:
                await self._echo(name, worker)
            case 2:
                for _ in range(5):
                    await worker.tell(Note(id=self._id(), to=worker.id, writer=name), timeout_s=0.2)
            case 3:
                path = tuple(self._carried(node, rng.choice(self.known)) for _ in range(rng.randrange(3)))
                await worker.ask(Relay(path=path), timeout_s=TIMEOUT_S)
            case 4:
                await worker.ask(Nap(seconds=rng.random()), timeout_s=rng.random())
            case 5:
                await self._stream(rng, worker)
            case 6:
                await worker.tell(Crash() if rng.random() < 0.7 else Leave(), timeout_s=TIMEOUT_S)
            case 7:
                plant = self._plant(rng, node)
                hired = await plant.ask(Hire(name=f"h{rng.randrange(3)}"), timeout_s=TIMEOUT_S)
                self.known.append(hired)
            case 8:
                if hired := [ref for ref in self.known if ref.name.startswith("h")]:
                    await self._plant(rng, node).ask(Fire(ref=rng.choice(hired)), timeout_s=TIMEOUT_S)

    async def _echo(self, name: str, worker: Ref) -> None:
        id = self._id()
        assert await worker.ask(Echo(id=id, to=worker.id, writer=name), timeout_s=TIMEOUT_S) == id
        if self.record.handled[id] != 1:
            self.sim.violate(f"message {id} was answered and handled {self.record.handled[id]} times")

    async def _stream(self, rng: random.Random, worker: Ref) -> None:
        got = 0
        stop = rng.randrange(400)
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(TIMEOUT_S),
                contextlib.aclosing(worker.stream(Numbers(count=200))) as items,
            ):
                async for number in items:
                    if number != got:
                        self.sim.violate(f"item {number} of a stream where {got} belongs")
                    got += 1
                    if got == stop:
                        return
                if got != 200:
                    self.sim.violate(f"a stream of 200 ended after {got}")

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id

    # --- faults -----------------------------------------------------------------------------------

    async def _chaos(self) -> None:
        sim, rng = self.sim, self.sim.rng
        while True:
            await asyncio.sleep(rng.random() * 0.5)
            processes = [host for host in sim.hosts[2:] if host.alive]
            if not processes:
                continue
            process = rng.choice(processes)
            fault = rng.randrange(7)
            HAPPENED[f"fault {fault}"] += 1
            match fault:
                case 0:
                    sim.kill(process)
                case 1:
                    sim.power_off(process)
                case 2:
                    sim.network.break_connections(rng.choice((process, self.other)))
                case 3:
                    await self._cut(self.root, rng.choice((process, self.other)), rng.random() * 25.0)
                case 4:
                    await self._cut(self.other, process, rng.random() * 5.0)
                case 5 | 6:
                    self._crash_one(rng)

    async def _cut(self, a: Host, b: Host, seconds: float) -> None:
        self.sim.network.partition(a, b)
        await asyncio.sleep(seconds)
        self.sim.network.heal(a, b)

    def _crash_one(self, rng: random.Random) -> None:
        """Anything of the root: a worker, a plant, at any of its steps."""
        lives = [life for life in self.nodes["root"].lives.values() if life.ref.name != "watcher"]
        if lives:
            rng.choice(lives).crash(ExitReason(kind="error", message="out of the blue"))

    def _heal(self) -> None:
        for a in self.sim.hosts:
            for b in self.sim.hosts:
                self.sim.network.heal(a, b)

    # --- what must hold in the end ----------------------------------------------------------------

    def _judge(self, node: Node) -> None:
        faults = []
        for strategy in STRATEGIES:
            plant = node.lookup(strategy)
            names = {*WORKERS[:2], PROCESS}  # the transient one may have left
            missing = [name for name in sorted(names) if plant is None or not self._lives_below(plant, name)]
            if missing:
                faults.append(f"{strategy}: {missing} do not live")
        for name, watcher in self.watchers.items():
            for ref in watcher.watched:
                downs, alive = watcher.downs[ref], self._is_alive(ref)
                if downs > 1 or (downs == 0 and not alive):
                    state = "lives" if alive else "is dead"
                    faults.append(f"{ref.label} {state}, {name}'s watcher got {downs} Downs of it")
        if faults:
            raise Violated("; ".join(faults))

    def _lives_below(self, plant: Ref, name: str) -> bool:
        life = self.nodes["root"].lives.get(plant.id)
        child = life.family.lookup(name) if life is not None else None
        return child is not None and self._is_alive(child)

    def _is_alive(self, ref: Ref) -> bool:
        for host, nodes in self.sim.nodes.items():
            if host is not None and host.alive:
                for node in nodes:
                    if node.id == ref.node_id:
                        return ref.id in node.lives
        return False


def plant_spec(strategy: Strategy) -> ChildSpec:
    return ChildSpec(name=strategy, start=lambda: Plant(strategy), shutdown_s=10.0)


async def turmoil(sim: Simulation) -> None:
    """In fair weather."""
    await Turmoil(sim).run()


async def gale(sim: Simulation) -> None:
    """Slow, with frames that come twice and readers that do not keep up."""
    sim.network.weather = Weather(latency_s=(0.001, 0.1), slow_readers=0.3, slow_s=0.005, duplicates=0.2)
    await Turmoil(sim).run()
