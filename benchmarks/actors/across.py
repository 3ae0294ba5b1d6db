"""Between two processes of one machine: over TCP, and over the unix socket that is the default there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from math import inf

from benchmarks.actors.asking import Asked, Make, in_flight, p50_s, tells
from benchmarks.actors.bare import BareClient, dial
from benchmarks.actors.messages import AskStep, Step
from benchmarks.actors.peers import Xoscar
from benchmarks.awake import awake_cores
from benchmarks.process import companion
from benchmarks.report import Report
from benchmarks.timing import Effort, Segment, rates
from gyre.actors import Node, ProcessSpec, Ref
from gyre.actors.transport import TransportName

P50_RATIO = 2.0
BARE_RATIO = 0.4
XOSCAR_RATIO = 5.0


async def across(report: Report, effort: Effort, xoscar: Xoscar) -> None:
    async with AsyncExitStack() as stack:
        tcp = await stack.enter_async_context(_echo("tcp"))
        unix = await stack.enter_async_context(_echo("unix"))
        bare = await stack.enter_async_context(_bare())
        await _latency(report, effort, tcp, unix, bare)
        await _throughput(report, effort, tcp, unix, bare, xoscar)


@asynccontextmanager
async def _echo(transport: TransportName) -> AsyncIterator[Ref]:
    async with Node(f"across-{transport}", transport=transport) as node:
        yield await node.spawn(ProcessSpec(name="echo", actor="benchmarks.actors.messages:Echo"))


@asynccontextmanager
async def _bare() -> AsyncIterator[BareClient]:
    async with companion("benchmarks.actors.bare") as server:
        client = await dial(server.hello["port"])
        yield client
        client.close()


async def _latency(report: Report, effort: Effort, tcp: Ref, unix: Ref, bare: BareClient) -> None:
    """Of each its best round. Where idle cores must wake up first, that decides most of it, so the gate is
    of cores that are awake."""
    peers: list[tuple[str, Asked, Make]] = [
        ("gyre.tcp", tcp, AskStep),
        ("bare.tcp", bare, Step),
        ("gyre.unix", unix, AskStep),
    ]
    ratios = {}
    for cores, context in (("halting_cores", nullcontext), ("awake_cores", awake_cores)):
        best = {name: inf for name, _, _ in peers}
        async with context():
            for _ in range(effort.rounds):
                for name, asked, make in peers:
                    best[name] = min(best[name], await p50_s(asked, effort.count(300), make))
        for name, p50 in best.items():
            report.figure(f"across.{name}.ask_p50.{cores}_us", p50 * 1e6)
        ratios[cores] = best["gyre.tcp"] / best["bare.tcp"]
    report.figure("across.tcp.ask_p50.halting_cores_to_bare_ratio", ratios["halting_cores"])
    report.at_most("across.tcp.ask_p50_to_bare_ratio", ratios["awake_cores"], P50_RATIO)


async def _throughput(
    report: Report, effort: Effort, tcp: Ref, unix: Ref, bare: BareClient, xoscar: Xoscar
) -> None:
    flights = effort.count(3200)
    segments = [
        Segment("gyre.tcp.in_flight", flights, lambda count: in_flight(tcp, count)),
        Segment("bare.tcp.in_flight", flights, lambda count: in_flight(bare, count, Step)),
        Segment("gyre.unix.in_flight", flights, lambda count: in_flight(unix, count)),
        Segment("gyre.tcp.tell", flights, lambda count: tells(tcp, count)),
        *xoscar.segment("across.sequential", effort.count(100)),
        *xoscar.segment("across.in_flight", effort.count(640)),
        *xoscar.segment("across.tell", effort.count(400)),
    ]
    per_s = await rates(segments, effort.rounds)
    for name, rate in per_s.items():
        report.figure(f"across.{name}_per_s".replace("across.xoscar.across", "across.xoscar.unix"), rate)
    ours = per_s["gyre.tcp.in_flight"]
    report.at_least("across.tcp.in_flight_to_bare_ratio", ours / per_s["bare.tcp.in_flight"], BARE_RATIO)
    name = "across.tcp.in_flight_to_xoscar_ratio"
    if xoscar.missing:
        report.unmet(name, ">=", XOSCAR_RATIO, xoscar.missing)
    else:
        report.at_least(name, ours / per_s["xoscar.across.in_flight"], XOSCAR_RATIO)
