"""Everything at once for a while: memory and file descriptors must stay as they are."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from statistics import median

import msgspec

from benchmarks.actors.asking import in_flight, tells
from benchmarks.actors.memory import rss_bytes
from benchmarks.actors.messages import FIELDS, AskStep, Echo
from benchmarks.report import Report
from gyre.actors import Ask, AskTimeout, ChildSpec, Node, ProcessSpec, Ref, RemoteError, Stream, handles

RSS_GROWTH_RATIO = 1.02
CHUNK = 256
RENEW_EVERY_S = 5.0


class Pid(Ask[int], frozen=True, kw_only=True):
    """Of the actor's process."""


class Refuse(Ask[None], frozen=True, kw_only=True):
    """Answered with an error."""


class Sleep(Ask[None], frozen=True, kw_only=True):
    """Never answered."""


class Count(Stream[int], frozen=True, kw_only=True):
    upto: int


class Soaked(Echo):
    """Answers, fails, hangs and streams."""

    @handles(Pid)
    async def pid(self, message: Pid) -> int:
        return os.getpid()

    @handles(Refuse, concurrent=True)
    async def refuse(self, message: Refuse) -> None:
        raise ValueError("no")

    @handles(Sleep, concurrent=True)
    async def sleep(self, message: Sleep) -> None:
        await asyncio.Event().wait()

    @handles(Count)
    async def upto(self, message: Count) -> AsyncIterator[int]:
        for at in range(message.upto):
            yield at


class Sample(msgspec.Struct, frozen=True):
    rss_bytes: int
    fds: int


async def soak(report: Report, soak_s: float) -> None:
    """The gates compare the last quarter with the second: the first warms up."""
    samples: dict[str, list[Sample]] = {"root": [], "child": []}
    async with Node("soak", transport="tcp", heartbeat_s=1.0) as node:
        child = await node.spawn(ProcessSpec(name="child", actor="benchmarks.actors.soak:Soaked"))
        local = await node.spawn(ChildSpec(name="local", start=Soaked))
        asked = await _load(node, child, local, soak_s, samples)
    report.figure("soak.duration_s", soak_s)
    report.figure("soak.rounds", asked)
    growth = {name: _growth(of) for name, of in samples.items()}
    for name, (rss_ratio, fds) in growth.items():
        report.figure(f"soak.{name}_rss_mib", samples[name][-1].rss_bytes / 2**20)
        report.figure(f"soak.{name}_rss_growth_ratio", rss_ratio)
        report.figure(f"soak.{name}_new_fds", fds)
    report.at_most("soak.rss_growth_ratio", max(rss for rss, _ in growth.values()), RSS_GROWTH_RATIO)
    report.at_most("soak.new_fds", max(fds for _, fds in growth.values()), 0)


def not_soaked(report: Report) -> None:
    reason = "not run: --soak 600"
    report.unmet("soak.rss_growth_ratio", "<=", RSS_GROWTH_RATIO, reason)
    report.unmet("soak.new_fds", "<=", 0, reason)


async def _load(node: Node, child: Ref, local: Ref, soak_s: float, samples: dict[str, list[Sample]]) -> int:
    """How many rounds of all loads there were."""
    pids = {"root": os.getpid(), "child": await child.ask(Pid())}
    over = node.loop.time() + soak_s
    rounds = itertools.count()

    async def repeat(load: Callable[[], Awaitable[object]], every_s: float = 0.0) -> None:
        while node.loop.time() < over:
            await load()
            next(rounds)
            await asyncio.sleep(min(every_s, max(0.0, over - node.loop.time())))

    async def sample() -> None:
        for name, pid in pids.items():
            samples[name].append(Sample(rss_bytes(pid), len(os.listdir(f"/proc/{pid}/fd"))))

    names = itertools.count()
    async with asyncio.TaskGroup() as tasks:
        for ref in (child, local):
            tasks.create_task(repeat(partial(in_flight, ref, CHUNK)))
            tasks.create_task(repeat(partial(tells, ref, CHUNK)))
            tasks.create_task(repeat(partial(_stream, ref)))
            tasks.create_task(repeat(partial(_trouble, ref), 0.01))
        tasks.create_task(repeat(partial(_come_and_go, node, names), 0.01))
        tasks.create_task(repeat(partial(_process, node, names), RENEW_EVERY_S))
        tasks.create_task(repeat(sample, min(1.0, soak_s / 40)))
    return next(rounds)


async def _stream(ref: Ref) -> None:
    async for _ in ref.stream(Count(upto=CHUNK)):
        pass
    async with contextlib.aclosing(ref.stream(Count(upto=CHUNK))) as items:
        await anext(items)


async def _trouble(ref: Ref) -> None:
    with contextlib.suppress(RemoteError):
        await ref.ask(Refuse())
    with contextlib.suppress(AskTimeout):
        await ref.ask(Sleep(), timeout_s=0.005)
    given_up = asyncio.ensure_future(ref.ask(Sleep()))
    await asyncio.sleep(0.001)
    given_up.cancel()
    await asyncio.wait([given_up])


async def _come_and_go(node: Node, names: itertools.count[int]) -> None:
    ref = await node.spawn(ChildSpec(name=f"guest-{next(names)}", start=Echo))
    await ref.ask(AskStep(seq=0, **FIELDS))
    await node.stop(ref)


async def _process(node: Node, names: itertools.count[int]) -> None:
    spec = ProcessSpec(name=f"guest-process-{next(names)}", actor="benchmarks.actors.messages:Echo")
    ref = await node.spawn(spec)
    await ref.ask(AskStep(seq=0, **FIELDS))
    await node.stop(ref)


def _growth(samples: list[Sample]) -> tuple[float, int]:
    """Of resident memory, a ratio of medians; of descriptors, the fewest of a quarter: some come and go."""
    quarter = max(1, len(samples) // 4)
    before, after = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
    rss = median(of.rss_bytes for of in after) / median(of.rss_bytes for of in before)
    return rss, min(of.fds for of in after) - min(of.fds for of in before)
