"""Deadlocks of independent chains of asks over several nodes: real processes, and many seeds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from gyre.actors import Actor, ActorError, Ask, AskTimeout, Node, ProcessSpec, Ref, WouldDeadlock, handles
from gyre.actors.testing import Simulation, run_seeds
from gyre.actors.testing.seeds import run_seed
from gyre.actors.waits import Waits
from tests.actors.conftest import start


class Arrive(Ask[None], frozen=True, kw_only=True):
    """Answered when as many have arrived as the gate is for."""


class Gate(Actor):
    def __init__(self, party: int) -> None:
        self.barrier = asyncio.Barrier(party)

    @handles(Arrive, concurrent=True)
    async def arrive(self, _: Arrive) -> None:
        await self.barrier.wait()


class Visit(Ask[int], frozen=True, kw_only=True):
    """Goes on to the next of `path`, after `gate` or a pause; answers how many were left."""

    path: tuple[Ref, ...]
    gate: Ref | None = None
    pause_s: float = 0.0


class Aside(Ask[int], frozen=True, kw_only=True):
    """As Visit, handled concurrently."""

    path: tuple[Ref, ...]


class Guest(Actor):
    @handles(Visit)
    async def visit(self, message: Visit) -> int:
        if message.gate is not None:
            await message.gate.ask(Arrive())
        await asyncio.sleep(message.pause_s)
        return await self.go_on(message.path, message.pause_s)

    @handles(Aside, concurrent=True)
    async def aside(self, message: Aside) -> int:
        return await self.go_on(message.path, 0.0)

    async def go_on(self, path: tuple[Ref, ...], pause_s: float) -> int:
        if not path:
            return 0
        return 1 + await path[0].ask(Visit(path=path[1:], pause_s=pause_s))


class Sideways(Guest):
    """Asks the next one for an Aside."""

    async def go_on(self, path: tuple[Ref, ...], pause_s: float) -> int:
        return 1 + await path[0].ask(Aside(path=path[1:])) if path else 0


async def guest(node: Node, name: str, actor: str = "Guest") -> Ref:
    """Of another process where the name is that of a letter's upper case."""
    if name.islower():
        return await start(node, {"Guest": Guest, "Sideways": Sideways}[actor](), name)
    return await node.spawn(ProcessSpec(name=name, actor=f"tests.actors.test_far_deadlock:{actor}"))


@pytest.mark.parametrize("names", ["aB", "AB", "AbC", "abC"])
async def test_a_cycle_over_processes_ends_at_once(node: Node, names: str) -> None:
    gate = await start(node, Gate(len(names)), "gate")
    refs = [await guest(node, name) for name in names]
    async with asyncio.timeout(20):
        answers = await asyncio.gather(
            *(
                ref.ask(Visit(path=(following,), gate=gate))
                for ref, following in zip(refs, refs[1:] + refs[:1], strict=True)
            ),
            return_exceptions=True,
        )
    errors = [answer for answer in answers if isinstance(answer, WouldDeadlock)]
    assert errors
    assert all(answer == 1 for answer in answers if answer not in errors)
    for error in errors:
        assert error.cycle[0] == error.cycle[-1]
        assert {label.removesuffix("#1") for label in error.cycle} == set(names)
    assert [await ref.ask(Visit(path=())) for ref in refs] == [0] * len(refs)
    assert len(node.waits) == 0


async def test_a_concurrent_handler_elsewhere_is_passed_through(node: Node) -> None:
    """`a` waits for an aside of `B`, which visits `C`, which visits `a`."""
    gate = await start(node, Gate(2), "gate")
    a, b, c = [await guest(node, "a", "Sideways"), await guest(node, "B"), await guest(node, "C")]
    async with asyncio.timeout(20):
        answers = await asyncio.gather(
            a.ask(Visit(path=(b, c), gate=gate)),
            c.ask(Visit(path=(a,), gate=gate)),
            return_exceptions=True,
        )
    assert any(isinstance(answer, WouldDeadlock) for answer in answers)
    assert not any(isinstance(answer, AskTimeout) for answer in answers)


SEEDS = 20
HOSTS, ACTORS, CLIENTS, VISITS = 3, 2, 4, 12


async def party(sim: Simulation, *, ordered: bool) -> Counter[str]:
    """Clients of all machines send guests of all machines to each other. Where all visits go upwards in one
    order no cycle can be."""
    hosts = [sim.host(f"machine-{index}") for index in range(HOSTS)]
    up: list[asyncio.Future[list[tuple[Ref, str]]]] = [sim.loop.create_future() for _ in hosts]
    clients = asyncio.Semaphore(0)
    over = asyncio.Event()
    outcomes: Counter[str] = Counter()

    async def client(name: str, refs: list[Ref]) -> None:
        rng = random.Random(f"{sim.seed}/{name}")
        for _ in range(VISITS):
            count = rng.randrange(2, 5)
            path = (
                sorted(rng.sample(range(len(refs)), count))
                if ordered
                else rng.sample(range(len(refs)), count)
            )
            first, *then = [refs[index] for index in path]
            try:
                await first.ask(Visit(path=tuple(then), pause_s=rng.random() * 0.02), timeout_s=120.0)
                outcomes["answered"] += 1
            except WouldDeadlock:
                outcomes["deadlock"] += 1
            except ActorError as error:
                sim.violate(f"{name}: {error}")
        clients.release()

    async def machine(index: int) -> None:
        async with sim.node(f"machine-{index}", hosts[index]) as node:
            endpoint = await node.listen()
            kinds = (Guest, Sideways)
            mine = [await start(node, kinds[n % 2](), f"g{index}{n}") for n in range(ACTORS)]
            up[index].set_result([(ref, endpoint) for ref in mine])
            refs = [
                node.bind(ref.node_id, endpoint, ref.id, ref.name, ref.incarnation)
                for ready in up
                for ref, endpoint in await asyncio.shield(ready)
            ]
            await asyncio.gather(*(client(f"{index}/{number}", refs) for number in range(CLIENTS)))
            await over.wait()
            if len(node.waits):
                sim.violate(f"{len(node.waits)} waits are left")

    tasks = [sim.start(host, machine(index)) for index, host in enumerate(hosts)]
    for _ in range(HOSTS * CLIENTS):
        await clients.acquire()
    over.set()
    for task in tasks:
        await task
    return outcomes


async def crossing(sim: Simulation) -> None:
    outcomes = await party(sim, ordered=False)
    if not outcomes["deadlock"]:
        sim.violate("nobody met")


async def upwards(sim: Simulation) -> None:
    outcomes = await party(sim, ordered=True)
    if outcomes["deadlock"]:
        sim.violate(f"{outcomes['deadlock']} deadlocks where none can be")


def test_no_deadlock_is_left_to_its_deadline() -> None:
    run_seeds(crossing, range(SEEDS))


def test_no_deadlock_is_seen_where_none_can_be() -> None:
    run_seeds(upwards, range(SEEDS))


def test_the_seeds_see_a_deadlock_that_nobody_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waits, "seek", lambda self, far, chain, actor_id, ask_id: None)
    assert any("did not answer Visit" in run_seed(crossing, seed).fault for seed in range(3))
