"""Streams that begin at a position, and go on at another actor when their producer is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from gyre.actors import (
    Actor,
    ActorDied,
    Ask,
    AwaitChild,
    ChildSpec,
    Moved,
    Node,
    ProcessSpec,
    Ref,
    Stream,
    Supervisor,
    handles,
    resumed,
)
from gyre.actors.testing import Simulation, run_seeds
from tests.actors.conftest import start
from tests.actors.zoo import Count, Counter, CounterConfig, Pid


class Range(Stream[int], frozen=True, kw_only=True):
    """The numbers below `upto`; the producer moves when it is asked for `leave_at`."""

    upto: int
    leave_at: int = -1


class Position(Ask[int], frozen=True, kw_only=True):
    pass


class Engine(Actor):
    """Begins where its consumer is."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.closed = asyncio.Event()

    @handles(Range, positioned=True)
    async def range(self, message: Range) -> AsyncIterator[int]:
        self.began.append(self.context.position)
        try:
            for number in range(self.context.position, message.upto):
                if number == message.leave_at and len(self.began) == 1:
                    raise Moved("to another machine")
                yield number
        finally:
            self.closed.set()

    @handles(Position)
    async def position(self, _: Position) -> int:
        return self.context.position


async def test_a_stream_begins_where_it_is_wanted(node: Node) -> None:
    ref = await start(node, Counter())
    items = ref.stream(Count(upto=100), position=40)
    assert [item async for item in items] == [*range(40, 100)]
    assert items.position == 100
    assert [item async for item in ref.stream(Count(upto=10), position=40)] == []


async def test_a_handler_that_can_begin_there_makes_nothing_in_vain(node: Node) -> None:
    engine = Engine()
    ref = await start(node, engine)
    assert [item async for item in ref.stream(Range(upto=100), position=98)] == [98, 99]
    assert [item async for item in ref.stream(Range(upto=2))] == [0, 1]
    assert engine.began == [98, 0]


async def test_only_a_stream_has_a_position(node: Node) -> None:
    ref = await start(node, Engine())
    with pytest.raises(Exception, match="only the handler of a Stream has a position"):
        await ref.ask(Position())
    with pytest.raises(ValueError, match="no position -1"):
        ref.stream(Range(upto=1), position=-1)
    with pytest.raises(TypeError, match="handles no Stream"):

        class Wrong(Actor):
            @handles(Position, positioned=True)  # type: ignore[call-overload]
            async def position(self, _: Position) -> int:
                return 0


async def test_a_stream_goes_on_at_the_next_life(node: Node) -> None:
    engines = [ChildSpec(name="engine", start=Engine)]
    supervisor = await node.spawn(ChildSpec(name="s", start=lambda: Supervisor(engines)))
    items = resumed(lambda left: supervisor.ask(AwaitChild(name="engine", after=left)), Range(upto=100))
    got = []
    async for item in items:
        got.append(item)
        if item == 50:
            first = items.ref
            await kill_child(supervisor)
    assert got == [*range(100)]
    assert items.ref is not None and first is not None
    assert (items.ref.name, items.ref.incarnation) == ("engine", first.incarnation + 1)


async def kill_child(supervisor: Ref) -> None:
    child = await supervisor.ask(AwaitChild(name="engine"))
    child.target.kill()  # type: ignore[attr-defined]


async def test_a_producer_can_hand_over(node: Node) -> None:
    first, second = await start(node, Engine(), "first"), await start(node, Engine(), "second")
    left: list[Ref | None] = []

    async def locate(ref: Ref | None) -> Ref:
        left.append(ref)
        return first if ref is None else second

    items = resumed(locate, Range(upto=60, leave_at=30), position=10)
    with pytest.raises(Moved):
        [item async for item in second.stream(Range(upto=60, leave_at=30), position=10)]
    assert [item async for item in items] == [*range(10, 60)]
    assert left == [None, first]
    assert items.position == 60


async def test_where_nobody_else_goes_on_the_error_is_raised(node: Node) -> None:
    ref = await start(node, Counter())

    async def locate(_: Ref | None) -> Ref:
        return ref

    items = resumed(locate, Count(upto=100))
    async with contextlib.aclosing(items):
        assert await anext(items) == 0
        ref.target.kill()  # type: ignore[attr-defined]
        with pytest.raises(ActorDied):
            [item async for item in items]


async def test_closing_cancels_the_handler(node: Node) -> None:
    engine = Engine()
    ref = await start(node, engine)

    async def locate(_: Ref | None) -> Ref:
        return ref

    async with contextlib.aclosing(resumed(locate, Range(upto=10**9))) as items:
        assert [await anext(items) for _ in range(3)] == [0, 1, 2]
    await engine.closed.wait()
    with pytest.raises(StopAsyncIteration):
        await anext(items)


async def test_kill_9_of_the_producers_process_loses_and_repeats_nothing(node: Node) -> None:
    specs = [ProcessSpec(name="engine", actor="tests.actors.zoo:Counter", config=CounterConfig())]
    supervisor = await node.spawn(ChildSpec(name="s", start=lambda: Supervisor(specs, max_restarts=9)))
    items = resumed(lambda left: supervisor.ask(AwaitChild(name="engine", after=left)), Count(upto=3000))
    got, pids = [], set()
    async for item in items:
        got.append(item)
        if item in (700, 2000):
            assert items.ref is not None
            pids.add(pid := await items.ref.ask(Pid()))
            os.kill(pid, signal.SIGKILL)
    assert got == [*range(3000)]
    assert len(pids) == 2


async def kills(sim: Simulation) -> None:
    """Producers' processes die at any time, connections to them break."""
    root = sim.host("root")

    async def consume() -> None:
        async with sim.node("root", root) as node:
            specs = [ProcessSpec(name="engine", actor="tests.actors.zoo:Counter", config=CounterConfig())]
            supervisor = await node.spawn(
                ChildSpec(name="s", start=lambda: Supervisor(specs, max_restarts=10**6))
            )
            items = resumed(
                lambda left: supervisor.ask(AwaitChild(name="engine", after=left)), Count(upto=400)
            )
            got = []
            async for item in items:
                got.append(item)
                await asyncio.sleep(sim.rng.random() * 0.01)
            if got != [*range(400)]:
                sim.violate(f"got {got}")
            lives.append(items.ref.incarnation if items.ref is not None else 0)

    lives: list[int] = []
    running = sim.start(root, consume())
    while not running.done():
        await asyncio.sleep(0.2 + sim.rng.random() * 0.5)
        for host in sim.hosts:
            if host.alive and host.name.startswith("engine"):
                (sim.kill if sim.rng.random() < 0.5 else sim.network.break_connections)(host)
    running.result()
    assert lives[0] > 1


def test_no_seed_loses_or_repeats_an_item() -> None:
    run_seeds(kills, range(20))
