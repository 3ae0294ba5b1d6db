"""What idle actors take, in a fresh process: `python -m benchmarks.actors.memory crowd|used COUNT`."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from resource import getpagesize
from time import perf_counter

import msgspec

from benchmarks.actors.messages import FIELDS, AskStep, Echo
from benchmarks.process import companion, quiet
from benchmarks.report import Report
from benchmarks.timing import Effort
from gyre.actors import ChildSpec, Node, Ref, run
from gyre.actors.idle import SWEEP_S

ACTORS = 100_000
BYTES_AN_ACTOR = 2048
USED_ACTORS = 4000
AT_ONCE = 400


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """Many actors that live at once; `bytes` of one before its first message, `answered` those that do."""

    spawn_s: float
    bytes: float
    rss_bytes: int
    answered: int
    ask_s: float
    stop_s: float


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes` of an actor that has answered and has rested for a while."""

    bytes: float


async def memory(report: Report, effort: Effort) -> None:
    async with companion("benchmarks.actors.memory", "crowd", str(effort.count(ACTORS))) as process:
        crowd = msgspec.convert(process.hello, Crowd)
    async with companion("benchmarks.actors.memory", "used", str(effort.count(USED_ACTORS))) as process:
        used = msgspec.convert(process.hello, Used)
    report.figure("memory.fresh_actor_bytes", crowd.bytes)
    report.figure("memory.crowd_rss_mib", crowd.rss_bytes / 2**20)
    report.figure("memory.crowd_spawn_s", crowd.spawn_s)
    report.figure("memory.crowd_ask_each_s", crowd.ask_s)
    report.figure("memory.crowd_stop_s", crowd.stop_s)
    report.at_most("memory.idle_actor_bytes", max(used.bytes, crowd.bytes), BYTES_AN_ACTOR)
    report.at_least("memory.actors_in_one_process", crowd.answered, ACTORS)


def rss_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * getpagesize()


async def _crowd(count: int) -> Crowd:
    async with Node("crowd") as node:
        before = await _settled(node)
        start = perf_counter()
        refs = await _spawned(node, count)
        spawned = perf_counter()
        gc.collect()
        rss = rss_bytes()
        asking = perf_counter()
        answered = sum([await _ask(refs[at : at + AT_ONCE]) for at in range(0, count, AT_ONCE)])
        stopping = perf_counter()
    return Crowd(
        spawn_s=spawned - start,
        bytes=(rss - before) / count,
        rss_bytes=rss,
        answered=answered,
        ask_s=stopping - asking,
        stop_s=perf_counter() - stopping,
    )


async def _used(count: int) -> Used:
    """They are asked a few at a time: memory that the busy ones took is not given back to the system, and
    is no idle actor's."""
    async with Node("used") as node:
        before = await _settled(node)
        refs = await _spawned(node, count)
        for at in range(0, count, AT_ONCE):
            await _ask(refs[at : at + AT_ONCE])
            await asyncio.sleep(2.2 * SWEEP_S)
        gc.collect()
        return Used(bytes=(rss_bytes() - before) / count)


async def _settled(node: Node) -> int:
    """The bytes of a process that has done each thing once."""
    first = await node.spawn(ChildSpec(name="first", start=Echo))
    await first.ask(AskStep(seq=0, **FIELDS))
    gc.collect()
    return rss_bytes()


async def _spawned(node: Node, count: int) -> list[Ref]:
    return [await node.spawn(ChildSpec(name=f"actor-{at}", start=Echo)) for at in range(count)]


async def _ask(refs: list[Ref]) -> int:
    answers = await asyncio.gather(*(ref.ask(AskStep(seq=at, **FIELDS)) for at, ref in enumerate(refs)))
    return sum(answer.seq == at for at, answer in enumerate(answers))


def main() -> None:
    quiet()
    kind, count = sys.argv[1], int(sys.argv[2])
    found = run(_crowd(count)) if kind == "crowd" else run(_used(count))
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
