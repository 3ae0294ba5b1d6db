"""Looking into simulated systems, whose processes freeze, die and are cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from gyre.actors import Actor, ActorError, Ask, ChildSpec, Node, ProcessSpec, Ref, SpawnFailed, handles
from gyre.actors.looking import ActorReport, Inspect, Trace, Traced
from gyre.actors.testing import Simulation, Weather

MODULE = "tests.actors.testing.test_looking"
WITHIN_S = 4.0


class Next(Ask[int], frozen=True, kw_only=True):
    pass


class Leaf(Actor):
    @handles(Next)
    async def next(self, message: Next) -> int:
        await asyncio.sleep(0.001)
        return 1


class Branch(Actor):
    """Has a Leaf in a process of its own, and asks it."""

    async def started(self) -> None:
        spec = ProcessSpec(name="leaf", actor=f"{MODULE}:Leaf", restart="temporary")
        self._leaf = await self.context.spawn(spec)

    @handles(Next)
    async def next(self, message: Next) -> int:
        return 1 + await self._leaf.ask(Next(), timeout_s=1.0)


class Top(Actor):
    def __init__(self, branches: int) -> None:
        self._names = [f"branch-{number}" for number in range(branches)]
        self._branches: list[Ref] = []

    async def started(self) -> None:
        for name in self._names:
            spec = ProcessSpec(name=name, actor=f"{MODULE}:Branch", restart="permanent")
            self._branches.append(await self.context.spawn(spec))

    @handles(Next)
    async def next(self, message: Next) -> int:
        return sum([await branch.ask(Next(), timeout_s=1.0) for branch in self._branches])


def reports(report: ActorReport) -> Iterator[ActorReport]:
    yield report
    for child in report.children:
        yield from reports(child)


async def system(node: Node) -> Ref:
    return await node.spawn(ChildSpec(name="top", start=lambda: Top(3)))


async def looked_into_under_kills(sim: Simulation) -> list[str]:
    """Someone looks again and again while processes are killed."""
    seen: list[str] = []

    async def root() -> None:
        async with sim.node("root", host) as node:
            await system(node)
            loop = asyncio.get_running_loop()
            for _ in range(20):
                began = loop.time()
                found = await node.desk().ask(Inspect(within_s=WITHIN_S), timeout_s=60.0)
                if loop.time() - began > WITHIN_S + 0.1:
                    sim.violate(f"a look took {loop.time() - began} s")
                seen.append(" ".join(f"{one.path}:{one.state}:{one.restarts}" for one in reports(found)))
                victims = [one for one in sim.hosts if one.alive and one is not host]
                if victims and sim.rng.random() < 0.3:
                    sim.kill(sim.rng.choice(victims))
                await asyncio.sleep(0.2)

    host = sim.host("root")
    task = sim.start(host, root())
    await asyncio.wait([task])
    if (error := task.exception()) is not None and not isinstance(error, ActorError | SpawnFailed):
        raise error
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_a_look_is_always_answered_whatever_dies(seed: int) -> None:
    seen = Simulation(seed, Weather()).run(looked_into_under_kills)
    assert seen
    assert all(state.startswith(":running:0 top:") for state in seen)


def test_the_same_seed_sees_the_same() -> None:
    runs = [Simulation(7, Weather()) for _ in range(2)]
    seen = [run.run(looked_into_under_kills) for run in runs]
    assert seen[0] == seen[1]
    assert runs[0].trace == runs[1].trace


def test_causes_lead_through_three_processes_in_virtual_time() -> None:
    told: list[Traced] = []

    async def root(sim: Simulation, host: object) -> None:
        async with sim.node("root", host) as node:  # type: ignore[arg-type]
            top = await system(node)

            async def read() -> None:
                async with aclosing(node.desk().stream(Trace())) as items:
                    async for one in items:
                        told.append(one)

            reading = asyncio.ensure_future(read())
            await asyncio.sleep(1.0)
            assert await top.ask(Next()) == 6
            await asyncio.sleep(1.0)
            reading.cancel()
            await asyncio.wait([reading])

    async def scenario(sim: Simulation) -> None:
        host = sim.host("root")
        await sim.start(host, root(sim, host))

    Simulation(1, Weather()).run(scenario)
    by_id = {one.id: one for one in told}
    leaves = [one for one in told if one.actor.endswith("/leaf")]
    assert [one.actor for one in leaves] == [f"top/branch-{number}/leaf" for number in range(3)]
    for leaf in leaves:
        branch = by_id[leaf.cause]
        assert leaf.actor == f"{branch.actor}/leaf"
        assert by_id[branch.cause].actor == "top"
        assert leaf.duration_s == pytest.approx(0.001)  # of the virtual clock
        assert branch.at_s < leaf.at_s
