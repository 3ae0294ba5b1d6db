"""Every token that an engine sampled is in one place, whatever happens to calls, proxies and engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gyre.actors import Actor, ActorDied, Ask, ChildSpec, Down, Node, ProcessSpec, Ref, handles
from gyre.actors.testing import Simulation
from gyre.proxy.conversation import Completion, Message
from gyre.proxy.messages import CloseExecution, OpenExecution
from gyre.schedule.messages import CloseRoute, OpenRoute
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.pack import plan_group
from gyre.trajectory.records import CallRecord, is_call_of
from tests.proxy import conserved
from tests.proxy.conserved import (
    LIVES,
    AbortAll,
    Chat,
    EngineConfig,
    Keeper,
    Kept,
    Open,
    ProxyProcessConfig,
    Restore,
)
from tests.trajectory.trees import result, spec

EXECUTIONS = ("g000000.00", "g000000.01")
CELLS = 3
TURNS = 5
FAULTS = ("move", "cut", "abort", "restart", "kill proxy")
HERE = conserved.__name__


class Parent(Actor):
    """Of processes, whose ends it knows."""

    async def process(self, name: str, actor: str, config: object) -> Ref:
        named = ProcessSpec(name=name, actor=f"{HERE}:{actor}", config=config, restart="temporary")  # type: ignore[arg-type]
        ref = await self.context.spawn(named)
        self.context.monitor(ref)
        return ref

    @handles(Down)
    async def down(self, message: Down) -> None:
        """Nothing is to be done."""


class Job:
    """Executions whose harnesses talk, while faults come."""

    def __init__(self, sim: Simulation, folder: Path, faults: tuple[str, ...]) -> None:
        self.sim = sim
        self.kept = Kept()
        self.happened: list[str] = []
        self._folder = folder
        self._faults = faults
        self._parent = Parent()
        self._engines: dict[int, Ref] = {}
        self._proxy: Ref
        self._keeper: Ref
        self._over = 0
        self._attempts = dict.fromkeys(EXECUTIONS, 0)
        self._next = 0
        self._anew = {execution: asyncio.Event() for execution in EXECUTIONS}
        self._back = asyncio.Event()
        self._open: dict[str, OpenExecution] = {}
        self._delivered: set[str] = set()

    async def run(self, node: Node) -> None:
        self._keeper = await node.spawn(ChildSpec(name="keeper", start=lambda: Keeper(self.kept)))
        await node.spawn(ChildSpec(name="parent", start=lambda: self._parent))
        for cell in range(CELLS):
            await self._new_engine(cell)
        await self._new_proxy()
        async with asyncio.TaskGroup() as tasks:
            for execution in EXECUTIONS:
                tasks.create_task(self._execution(execution))
            tasks.create_task(self._disturb())

    # --- a harness ----------------------------------------------------------------------------------

    async def _execution(self, name: str) -> None:
        """Attempts until one is not begun anew."""
        while True:
            self._attempts[name] += 1
            assert self._attempts[name] <= 5, "it is begun anew a few times"
            self._anew[name].clear()
            self.kept.open(spec(name, attempt=self._attempts[name]))
            talking = asyncio.create_task(self._talk(name, self._attempts[name]))
            anew = asyncio.create_task(self._anew[name].wait())
            await asyncio.wait([talking, anew], return_when=asyncio.FIRST_COMPLETED)
            anew.cancel()
            undisturbed = talking.done()
            talking.cancel()
            del self._open[name]
            await self._of_any_life(lambda: CloseExecution(execution=name))
            if undisturbed:
                talking.result()
                break
        ended = self.kept.book.end(spec(name, attempt=self._attempts[name]), result(name, float(name[-1])))
        self.kept.book.close(ended)
        self._over += 1

    async def _talk(self, name: str, attempt: int) -> None:
        opening = OpenExecution(execution=name, attempt=attempt, key=f"key of {name}, {attempt}")
        self._open[name] = opening
        await self._of_any_life(lambda: Open(opening=opening))
        async with asyncio.TaskGroup() as lanes:
            for lane in ("main", "aside"):
                lanes.create_task(self._lane(opening.key, f"{lane} of {name}"))

    async def _lane(self, key: str, text: str) -> None:
        messages: tuple[Message, ...] = ()
        for turn in range(TURNS):
            messages += (Message(role="user", content=(f"{text}, turn {turn}",)),)
            asked = Chat(key=key, messages=messages)
            answer: Completion = await self._of_any_life(lambda asked=asked: asked)  # type: ignore[misc]
            self._delivered.add(answer.call)
            messages += (answer.message,)

    async def _of_any_life(self, message: Callable[[], Ask[Any]]) -> Any:
        """Asks the proxy, and where it dies over it the next one."""
        while True:
            proxy, back = self._proxy, self._back
            try:
                return await proxy.ask(message(), timeout_s=600.0)
            except ActorDied:
                await back.wait()

    # --- what disturbs it ---------------------------------------------------------------------------

    async def _disturb(self) -> None:
        rng = self.sim.rng
        while self._over < len(EXECUTIONS):
            await asyncio.sleep(rng.random() * 0.2)
            fault, cell = rng.choice(self._faults), rng.randrange(CELLS)
            if self.happened.count(fault) == 3:
                continue
            self.happened.append(fault)
            match fault:
                case "move" | "cut":
                    await self._proxy.ask(CloseRoute(cell=cell, lost=fault == "cut"))
                    await asyncio.sleep(rng.random() * 0.2)
                    await self._open_route(cell)
                case "abort":
                    await self._engines[cell].tell(AbortAll())
                case "restart":
                    for name in self._open:
                        self._anew[name].set()
                case "kill proxy":
                    self._kill(self._proxy_name)
                    await asyncio.sleep(rng.random() * 0.1)
                    await self._new_proxy()
                case "kill engine":
                    self._kill(f"engine-{cell}-")
                    await self._new_engine(cell)
                    await self._open_route(cell)

    def _kill(self, name: str) -> None:
        for host in self.sim.hosts:
            if host.alive and host.name.startswith(name):
                self.sim.kill(host)

    async def _new_engine(self, cell: int) -> None:
        version = self._next = self._next + 1
        name = f"engine-{cell}-{version}"
        self._engines[cell] = await self._parent.process(name, "EngineActor", EngineConfig(version=version))

    async def _new_proxy(self) -> None:
        self._next += 1
        self._proxy_name = f"proxy-{self._next}"
        config = ProxyProcessConfig(folder=str(self._folder), keeper=self._keeper)
        proxy = await self._parent.process(self._proxy_name, "ProxyProcess", config)
        # As its keeper has it.
        for opening in [*self._open.values()]:
            await proxy.ask(self._restored(opening))
        for cell in range(CELLS):
            await self._open_route(cell, proxy)
        self._proxy = proxy
        back, self._back = self._back, asyncio.Event()
        back.set()

    def _restored(self, opening: OpenExecution) -> Restore:
        name, attempt = opening.execution, opening.attempt
        records = tuple(record for record in self.kept.records if is_call_of(record.call, name, attempt))
        delivered, lives = frozenset(self._delivered), self.happened.count("kill proxy")
        return Restore(opening=opening, records=records, delivered=delivered, lives=lives)

    async def _open_route(self, cell: int, proxy: Ref | None = None) -> None:
        await (proxy or self._proxy).ask(
            OpenRoute(
                cell=cell,
                incarnation=self._next,
                engines=(self._engines[cell],),
                version=0,
                capacity_calls=8,
                window_tokens=2048,
            )
        )


async def scenario(sim: Simulation, folder: Path, faults: tuple[str, ...]) -> Job:
    LIVES.clear()
    root = sim.host("root")
    job = Job(sim, folder, faults)

    async def main() -> None:
        async with sim.node("root", root) as node:
            await job.run(node)
            check(job)

    await sim.start(root, main())
    return job


def check(job: Job) -> None:
    kept = job.kept
    # Where engines say what they sampled, the records have the very same, bit for bit.
    sampled = {
        (version, token.call, token.position, token.token, token.logprob)
        for version, life in LIVES.items()
        for token in life.engine.tokens
    }
    for record in kept.records:
        numbers = zip(record.versions, record.output_ids, record.logprobs, strict=True)
        for position, (version, token, logprob) in enumerate(numbers):
            assert (version, record.call, position, token, logprob) in sampled
    # Of each call nothing is missing and nothing is listed twice; what a dead engine knew it cannot tell.
    undelivered = kept.undelivered_tokens()
    bounds = unrecorded(kept.records)
    assert {*undelivered} <= {*bounds}
    for call, (least, most) in bounds.items():
        assert least <= undelivered[call] <= most, call
    # All that is known of is trained, or excluded for a reason.
    group = kept.book.group("g000000")
    ledger = plan_group("g000000", 0, group.scored.values(), SamplingConfig(), 4096).ledger
    known = sum(len(record.output_ids) for record in kept.records) + undelivered.total()
    assert ledger.trained_tokens + sum(group.excluded_tokens(ledger).values()) == known


def unrecorded(records: list[CallRecord]) -> dict[str, tuple[int, int]]:
    """By call, how many sampled tokens are in no record: of engines that live, and of all."""
    recorded = Counter((record.call, version) for record in records for version in record.versions)
    living, all_engines = Counter[str](), Counter[str]()
    for version, life in LIVES.items():
        lost = Counter(token.call for token in life.engine.tokens)
        lost -= Counter({call: recorded[call, version] for call in lost})
        all_engines += lost
        living += lost if life.host.alive else Counter()
    return {call: (living[call], tokens) for call, tokens in all_engines.items()}


def happened_in(seeds: range, run: Callable[[Simulation], object]) -> set[str]:
    """To calls and tokens, in all of these runs."""
    found: set[str] = set()
    for seed in seeds:
        job = Simulation(seed).run(run)  # type: ignore[arg-type]
        assert isinstance(job, Job)
        found |= {*job.happened}
        found |= {"undelivered"} if job.kept.undelivered_tokens() else set()
        found |= {record.finish_reason for record in job.kept.records}
        found |= {"moved"} if any(record.moved_at for record in job.kept.records) else set()
    return found


@pytest.mark.parametrize("faults", [FAULTS, (*FAULTS, "kill engine")], ids=["engines live", "engines die"])
def test_every_token_of_every_engine_is_recorded_or_listed_as_undelivered(
    chatml_folder: Path, faults: tuple[str, ...]
) -> None:
    happened = happened_in(range(6), partial(scenario, folder=chatml_folder, faults=faults))
    assert happened >= {*faults, "undelivered", "unfinished", "stop", "moved"}
