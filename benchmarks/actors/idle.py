"""What a node costs that has nothing to do."""

from __future__ import annotations

import asyncio
from time import perf_counter, process_time

from benchmarks.actors.messages import CpuSeconds, Echo
from benchmarks.report import Report
from gyre.actors import ChildSpec, Node, ProcessSpec

ACTORS = 1000
CPU_FRACTION = 0.01
SETTLE_S = 3.0
IDLE_S = 20.0


async def idle(report: Report, idle_s: float = IDLE_S, settle_s: float = SETTLE_S) -> None:
    """Two nodes, linked over TCP with a heartbeat every second, the root with a thousand actors."""
    async with Node("idle", transport="tcp", heartbeat_s=1.0) as node:
        child = await node.spawn(ProcessSpec(name="child", actor="benchmarks.actors.messages:Clocked"))
        for at in range(ACTORS):
            await node.spawn(ChildSpec(name=f"actor-{at}", start=Echo))
        await asyncio.sleep(settle_s)
        start, root_s, child_s = perf_counter(), process_time(), await child.ask(CpuSeconds())
        await asyncio.sleep(idle_s)
        root_s, child_s = process_time() - root_s, await child.ask(CpuSeconds()) - child_s
        took_s = perf_counter() - start
    report.figure("idle.root_cpu_fraction", root_s / took_s)
    report.figure("idle.child_cpu_fraction", child_s / took_s)
    report.at_most("idle.cpu_fraction", max(root_s, child_s) / took_s, CPU_FRACTION)
