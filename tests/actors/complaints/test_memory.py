"""Complaints of memory, descriptors and connections that grow, and of floods."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from gyre.actors import Actor, MailboxFull, Node, Ref, Tell, handles
from gyre.actors.flow import CREDIT
from gyre.actors.node import EXITS_KEPT
from tests.actors.conftest import life, start
from tests.actors.pairs import Two, two_nodes
from tests.actors.zoo import Add, Count, Counter, Observe, Observed, Observer

# 100000 as in the complaint: GYRE_CALLERS=100000 pytest tests/actors/complaints
CALLERS = int(os.environ.get("GYRE_CALLERS", "1500"))
WARM = EXITS_KEPT + 100


class Parcel(Tell, frozen=True, kw_only=True):
    data: bytes


class Consumer(Actor):
    """Slower than any producer."""

    def __init__(self) -> None:
        self.count = 0

    @handles(Parcel)
    async def parcel(self, message: Parcel) -> None:
        self.count += 1
        if self.count % 50 == 0:
            await asyncio.sleep(0.001)


class Call(Tell, frozen=True, kw_only=True):
    to: Ref
    observer: Ref


class Caller(Actor):
    """Asks, streams, is monitored, and is gone."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    @handles(Call)
    async def call(self, message: Call) -> None:
        await message.observer.tell(Observe(ref=self.context.ref))
        await message.to.ask(Add(amount=1))
        async for _ in message.to.stream(Count(upto=3)):
            pass
        self.done.set()
        self.context.stop()


class Flood(Tell, frozen=True, kw_only=True):
    to: Ref
    count: int


class Ball(Tell, frozen=True, kw_only=True):
    back: Ref | None


class Player(Actor):
    """Sends each ball back; those that find no room are dropped."""

    def __init__(self) -> None:
        self.got = 0
        self.sent = asyncio.Event()

    @handles(Flood, concurrent=True)
    async def flood(self, message: Flood) -> None:
        for _ in range(message.count):
            try:
                await message.to.tell(Ball(back=self.context.ref), timeout_s=1.0)
            except MailboxFull:
                break
        self.sent.set()

    @handles(Ball)
    async def ball(self, message: Ball) -> None:
        self.got += 1
        if message.back is not None:
            try:
                await message.back.tell(Ball(back=None), timeout_s=0.01)
            except MailboxFull:
                return


@pytest.fixture(params=["unix", "tcp"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Two]:
    async with two_nodes(request.param) as two:
        yield two


@pytest.mark.parametrize("far", [False, True])
async def test_a_producer_that_outruns_its_consumer_fills_no_memory(pair: Two, far: bool) -> None:
    """Calls queued without bound until the machine was out of memory (ray#18703, protoactor-dotnet#2109)."""
    consumer = Consumer()
    ref = await start(pair.b, consumer)
    to = pair.carry(ref) if far else ref
    await to.tell(Parcel(data=b"x"))
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(8000):
            await to.tell(Parcel(data=bytes(8192)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * CREDIT * 8192 < 8000 * 8192 / 2
    assert consumer.count > 8001 - 2 * CREDIT - 200


async def visit(node: Node, number: int, to: Ref, observer: Ref) -> None:
    caller = Caller()
    ref = await start(node, caller, f"caller-{number}")
    ended = life(ref).ended
    await ref.tell(Call(to=to, observer=observer))
    await caller.done.wait()
    await asyncio.wait([ended])


def kept(node: Node) -> dict[str, int]:
    """What a node holds for those who are gone."""
    links = node.links.all()
    return {
        "lives": len(node.lives),
        "children": len(node._family._children),
        "deadlines": sum(len(slot) for slot in node.deadlines._slots.values()),
        "pending": sum(len(link.pending) + len(link.incoming) for link in links),
        "flows": sum(len(link.flows) for link in links),
        "taken": sum(len(link._taken) for link in links),
        "watched": sum(len(link._watched) for link in links),
        "watchers": sum(len(life.watchers._tell or ()) for life in node.lives.values()),
        "awake": len(node.idle._awake),
        "links": len(links),
    }


@pytest.mark.timeout(60 + CALLERS // 50)
async def test_callers_that_come_and_go_leave_nothing_behind(pair: Two) -> None:
    """A queue for each caller was never freed (ray#38928)."""
    to = pair.carry(await start(pair.b, Counter()))
    here, there = await start(pair.a, Observer(), "here"), await start(pair.b, Observer(), "there")
    observers = (here, pair.carry(there))
    for number in range(WARM):  # the last reasons of death are kept, up to a bound
        await visit(pair.a, number, to, observers[number % 2])
    await all_seen((here, there), observers, WARM // 2)
    before, objects = (kept(pair.a), kept(pair.b)), live_objects()
    for number in range(CALLERS):
        await visit(pair.a, number, to, observers[number % 2])
    await all_seen((here, there), observers, CALLERS // 2)
    assert (kept(pair.a), kept(pair.b)) == before
    assert live_objects() - objects < 1000 + CALLERS // 100


async def all_seen(local: tuple[Ref, ...], observers: tuple[Ref, ...], count: int) -> None:
    """Each has got so many Downs; and forgets them, as we do."""
    for ref, observer in zip(local, observers, strict=True):
        await observer.ask(Observed(count=count))
        actor = life(ref).actor
        assert isinstance(actor, Observer)
        actor.downs.clear()
        await observer.ask(Observed(count=0))


def live_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


async def test_hundreds_of_actors_share_one_connection(pair: Two) -> None:
    """ "too many clients" above a hundred actors, each pair with a connection of its own (xoscar#63)."""
    refs = [pair.carry(await start(pair.b, Counter(), f"b{index}")) for index in range(300)]
    await refs[0].ask(Add(amount=1))
    descriptors = len(os.listdir("/proc/self/fd"))
    callers = []
    for index in range(300):
        counter = Counter()
        counter.peer = refs[index]
        callers.append(await start(pair.a, counter, f"a{index}"))
    answers = await asyncio.gather(*(ref.ask(Add(amount=1)) for ref in (*refs, *callers) for _ in range(2)))
    assert len(answers) == 1200
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert len(pair.a.links.all()) == len(pair.b.links.all()) == 1


async def test_peers_that_flood_each_other_and_read_no_answers_go_on(pair: Two) -> None:
    """500 messages whose answers nobody read wedged both ends for good (thespian, measured)."""
    one, two = Player(), Player()
    a, b = await start(pair.a, one, "one", mailbox=64), await start(pair.b, two, "two", mailbox=64)
    count = CREDIT + 400
    async with asyncio.timeout(45):
        await a.tell(Flood(to=pair.carry(b), count=count))
        await b.tell(Flood(to=pair.carry_back(a), count=count))
        await one.sent.wait()
        await two.sent.wait()
        # And both still do what they are asked to.
        await a.tell(Ball(back=None))
        await b.tell(Ball(back=None))
    assert one.got > 500
    assert two.got > 500
