"""Asks, cancels, deadlines, deaths and broken links at random: each ask ends, nothing is kept."""

from __future__ import annotations

import asyncio
import random
from collections import Counter as Tally

import pytest

from gyre.actors import (
    Actor,
    ActorDied,
    ActorError,
    Ask,
    AskTimeout,
    ChildSpec,
    Node,
    Ref,
    RemoteError,
    Stream,
    Supervision,
    handles,
)
from tests.actors.conftest import until
from tests.actors.test_links import TOKEN, carry
from tests.actors.zoo import Quit

from collections.abc import AsyncIterator  # isort: skip


class Visit(Ask[int], frozen=True, kw_only=True):
    path: tuple[Ref, ...]
    seed: int


class VisitAside(Ask[int], frozen=True, kw_only=True):
    path: tuple[Ref, ...]
    seed: int


class Walk(Stream[int], frozen=True, kw_only=True):
    count: int


class Traveller(Actor):
    """Asks on along a path, now and then slow, now and then failing."""

    async def _visit(self, path: tuple[Ref, ...], seed: int) -> int:
        rng = random.Random(seed)
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.05:
            raise ValueError("lost")
        if not path:
            return 0
        kind = Visit if rng.random() < 0.5 else VisitAside
        return 1 + await path[0].ask(
            kind(path=path[1:], seed=rng.randrange(10**6)), timeout_s=rng.random() * 0.2
        )

    @handles(Visit)
    async def visit(self, message: Visit) -> int:
        return await self._visit(message.path, message.seed)

    @handles(VisitAside, concurrent=True)
    async def visit_aside(self, message: VisitAside) -> int:
        return await self._visit(message.path, message.seed)

    @handles(Walk)
    async def walk(self, message: Walk) -> AsyncIterator[int]:
        for i in range(message.count):
            yield i

    @handles(Quit)
    async def quit(self, message: Quit) -> None:
        self.context.stop()


async def wander(rng: random.Random, refs: list[Ref], tally: Tally[str]) -> None:
    path = tuple(rng.choice(refs) for _ in range(rng.randrange(1, 5)))
    if rng.random() < 0.2:
        try:
            got = [item async for item in path[0].stream(Walk(count=100))]
            assert got == [*range(100)]
            tally["walked"] += 1
        except ActorDied:
            tally["died"] += 1
        return
    asked = asyncio.ensure_future(path[0].ask(Visit(path=path[1:], seed=rng.randrange(10**6)), timeout_s=0.3))
    if rng.random() < 0.2:
        asyncio.get_running_loop().call_later(rng.random() * 0.05, asked.cancel)
    try:
        assert await asked == len(path) - 1
        tally["answered"] += 1
    except asyncio.CancelledError:
        tally["cancelled"] += 1
    except (AskTimeout, RemoteError, ActorDied) as error:
        tally[type(error).__name__] += 1
    except ActorError as error:  # WouldDeadlock
        tally[type(error).__name__] += 1


async def some(node: Node, name: str, count: int) -> list[Ref]:
    specs = [ChildSpec(name=f"{name}{i}", start=Traveller, mailbox=8, shutdown_s=0.5) for i in range(count)]
    return [await node.spawn(spec) for spec in specs]


def kept(node: Node) -> list[object]:
    """What is left of asks that are over."""
    lives, links = node.lives.values(), node.links.all()
    found: list[object] = [slot for slot in node.deadlines._slots.values() if slot]
    found += [life for life in lives if life.mailbox.running or life.mailbox.queue or life._handling]
    return found + [link for link in links if link.pending or link.incoming]


@pytest.mark.parametrize("seed", range(10))
async def test_every_ask_ends(seed: int) -> None:
    rng = random.Random(seed)
    tally: Tally[str] = Tally()
    async with Node(name="chaos", supervision=Supervision(max_restarts=10**6)) as node:
        refs = await some(node, "t", 6)
        async with asyncio.timeout(35), asyncio.TaskGroup() as group:
            for _ in range(150):
                group.create_task(wander(rng, refs, tally))
                if rng.random() < 0.1:
                    await asyncio.sleep(0.001)
                if rng.random() < 0.03:
                    await rng.choice(refs).tell(Quit())
                if rng.random() < 0.05:
                    refs = [node.lookup(f"t{i}") or refs[i] for i in range(6)]
        await until(lambda: not kept(node))
    assert tally.total() == 150
    assert tally["answered"] >= 1


@pytest.mark.parametrize("transport", ["memory", "unix", "tcp", "ucx"])
@pytest.mark.parametrize("seed", range(4))
async def test_every_ask_ends_over_links_that_break(seed: int, transport: str) -> None:
    rng = random.Random(seed)
    tally: Tally[str] = Tally()
    rules = Supervision(max_restarts=10**6)
    async with (
        Node(name="a", transport=transport, token=TOKEN, supervision=rules) as a,  # type: ignore[arg-type]
        Node(name="b", transport=transport, token=TOKEN, supervision=rules) as b,  # type: ignore[arg-type]
    ):
        await a.listen()
        await b.listen()
        here = await some(a, "a", 4)
        there = [carry(ref, b, a) for ref in await some(b, "b", 4)]
        async with asyncio.timeout(35), asyncio.TaskGroup() as group:
            for _ in range(150):
                group.create_task(wander(rng, here + there, tally))
                if rng.random() < 0.1:
                    await asyncio.sleep(0.002)
                if rng.random() < 0.03:
                    for link in rng.choice((a, b)).links.all():
                        link.close()
        await until(lambda: not kept(a) and not kept(b))
        assert len(a.links.all()) <= 1
    assert tally.total() == 150
    assert tally["answered"] >= 1
