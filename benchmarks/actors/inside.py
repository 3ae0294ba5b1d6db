"""Within one process: asks, tells, spawns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from time import perf_counter

from benchmarks.actors.asking import in_flight, sequential, tells
from benchmarks.actors.bare import BareActor
from benchmarks.actors.messages import FIELDS, Echo, Step
from benchmarks.actors.peers import Xoscar
from benchmarks.report import Report
from benchmarks.timing import Effort, Segment, rates
from gyre.actors import ChildSpec, Node, Ref

ASK_RATIO = 0.5
TELLS_PER_S = 1.5e6
SPAWNS_PER_S = 20e3


async def inside(report: Report, effort: Effort, xoscar: Xoscar) -> None:
    async with Node("inside") as node:
        gyre = await node.spawn(ChildSpec(name="echo", start=Echo))
        bare = BareActor()
        try:
            asks = _asks(effort, gyre, bare) + _spawns(effort, node) + _of_xoscar(effort, xoscar)
            per_s = await rates(asks, effort.rounds)
        finally:
            bare.task.cancel()
    for name, rate in per_s.items():
        report.figure(f"inside.{name}_per_s".replace("inside.xoscar.inside", "inside.xoscar"), rate)
    ratio = per_s["gyre.sequential"] / per_s["bare.sequential"]
    report.at_least("inside.ask_sequential_to_bare_ratio", ratio, ASK_RATIO)
    report.figure("inside.ask_in_flight_to_bare_ratio", per_s["gyre.in_flight"] / per_s["bare.in_flight"])
    report.figure("inside.tell_to_bare_ratio", per_s["gyre.tell"] / per_s["bare.tell"])
    report.at_least("inside.tell_per_s", per_s["gyre.tell"], TELLS_PER_S)
    report.at_least("inside.spawn_per_s", per_s["gyre.spawn"], SPAWNS_PER_S)


def _asks(effort: Effort, gyre: Ref, bare: BareActor) -> list[Segment]:
    asks, flights, told = effort.count(2000), effort.count(6400), effort.count(20000)
    return [
        Segment("gyre.sequential", asks, lambda count: sequential(gyre, count)),
        Segment("bare.sequential", asks, lambda count: sequential(bare, count, Step)),
        Segment("gyre.in_flight", flights, lambda count: in_flight(gyre, count)),
        Segment("bare.in_flight", flights, lambda count: in_flight(bare, count, Step)),
        Segment("gyre.tell", told, lambda count: tells(gyre, count)),
        Segment("bare.tell", told, lambda count: tells(bare, count, Step, Step)),
    ]


def _spawns(effort: Effort, node: Node) -> list[Segment]:
    names = itertools.count()

    async def gyre(count: int) -> float:
        refs = []
        start = perf_counter()
        for _ in range(count):
            refs.append(await node.spawn(ChildSpec(name=f"spawned-{next(names)}", start=Echo)))
        took_s = perf_counter() - start
        for ref in refs:
            await node.stop(ref)
        return took_s

    async def bare(count: int) -> float:
        """Each is asked once: until then a bare actor is no more than an object."""
        step = Step(seq=0, **FIELDS)
        start = perf_counter()
        actors = [BareActor() for _ in range(count)]
        for actor in actors:
            await actor.ask(step)
        took_s = perf_counter() - start
        with _cancelled(actors) as tasks:
            await asyncio.wait(tasks)
        return took_s

    count = effort.count(1000)
    return [Segment("gyre.spawn", count, gyre), Segment("bare.spawn_and_ask", count, bare)]


@contextlib.contextmanager
def _cancelled(actors: list[BareActor]) -> Iterator[list[asyncio.Task[None]]]:
    for actor in actors:
        actor.task.cancel()
    yield [actor.task for actor in actors]


def _of_xoscar(effort: Effort, xoscar: Xoscar) -> list[Segment]:
    counts = {"sequential": 400, "in_flight": 640, "tell": 400, "spawn": 100}
    return [
        segment
        for name, count in counts.items()
        for segment in xoscar.segment(f"inside.{name}", effort.count(count))
    ]
