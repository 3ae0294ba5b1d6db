from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from gyre.actors import Actor, Node, ProcessSpec, Ref, RemoteError, handles
from gyre.actors.looking import Trace, Traced
from tests.actors.conftest import life, start, until
from tests.actors.test_reach import tcp_node
from tests.actors.zoo import (
    Add,
    AddToPeer,
    Bump,
    Count,
    Counter,
    CounterConfig,
    Crash,
    Fail,
    Hang,
    NestConfig,
    Observe,
    Observed,
    Observer,
    Total,
)

ZOO = "tests.actors.zoo"


def process(name: str, peer: Ref | None = None, actor: str = "Counter") -> ProcessSpec:
    config = NestConfig() if actor == "Nest" else CounterConfig(peer=peer)
    return ProcessSpec(name=name, actor=f"{ZOO}:{actor}", config=config, restart="temporary")


class Seen:
    """What a trace told so far."""

    def __init__(self) -> None:
        self.all: list[Traced] = []
        self._more = asyncio.Condition()

    async def add(self, one: Traced) -> None:
        self.all.append(one)
        async with self._more:
            self._more.notify_all()

    async def of(self, message: str, count: int = 1) -> list[Traced]:
        """Those of that type, when there are so many."""

        def found() -> list[Traced]:
            return [one for one in self.all if one.message == f"{ZOO}:{message}"]

        async with self._more, asyncio.timeout(10):
            await self._more.wait_for(lambda: len(found()) >= count)
        return found()


@asynccontextmanager
async def tracing(node: Node, path: str = "", *processes: Ref) -> AsyncIterator[Seen]:
    """The trace of a node and of its child processes; it has begun when the block does, in these too."""
    seen = Seen()

    async def read() -> None:
        async with aclosing(node.desk().stream(Trace(path=path))) as items:
            async for one in items:
                await seen.add(one)

    reading = asyncio.ensure_future(read())
    await until(lambda: node.probes.on)
    await asyncio.sleep(0)  # others are asked in the next turn
    for ref in processes:
        await ref.ask(Total())  # by its answer that process tells
    try:
        yield seen
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_each_message_is_told_when_it_was_handled(node: Node) -> None:
    ref = await start(node, Counter())
    told: list[Traced] = []
    with node.trace(told.append):
        await ref.ask(Add(amount=1))
        await ref.tell(Bump())
        await ref.ask(Total())
        assert [item async for item in ref.stream(Count(upto=2))] == [0, 1]
    await ref.ask(Add(amount=1))
    assert sorted(one.message for one in told) == [
        f"{ZOO}:{name}" for name in ("Add", "Bump", "Count", "Total")
    ]
    assert {(one.actor, one.incarnation, one.outcome) for one in told} == {("a", 1, "ok")}
    assert len({one.id for one in told}) == 4
    assert all(one.duration_s >= 0 and one.lost == 0 for one in told)


async def test_causes_lead_from_message_to_message(node: Node) -> None:
    last = await start(node, Counter(), "last")
    middle = await start(node, Counter(CounterConfig(peer=last)), "middle")
    told: list[Traced] = []
    with node.trace(told.append):
        await middle.ask(AddToPeer(amount=1))
    inner, outer = told  # the inner ends first
    assert (inner.actor, outer.actor) == ("last", "middle")
    assert inner.cause == outer.id
    assert outer.cause == 0


class Relay(Actor):
    """Asks another, which asks its peer."""

    def __init__(self, to: Ref) -> None:
        self.to = to

    @handles(AddToPeer)
    async def relay(self, message: AddToPeer) -> int:
        return await self.to.ask(message)


async def test_causes_lead_through_other_processes(node: Node) -> None:
    """Here, to a process, and back here."""
    end = await start(node, Counter(), "end")
    through = await node.spawn(process("through", peer=end))
    begin = await start(node, Relay(through), "begin")
    async with tracing(node, "", through) as seen:
        await begin.ask(AddToPeer(amount=1))
        (final,) = await seen.of("Add")
        hop, first = sorted(await seen.of("AddToPeer", 2), key=lambda one: one.actor, reverse=True)
    assert (first.actor, hop.actor, final.actor) == ("begin", "through", "end")
    assert (first.cause, hop.cause, final.cause) == (0, first.id, hop.id)
    assert first.at_s < hop.at_s < final.at_s  # one clock for all processes of a machine
    assert first.duration_s > hop.duration_s > final.duration_s


@pytest.mark.parametrize(("path", "told"), [("", 2), ("p", 1), ("p/inner", 0), ("other", 0)])
async def test_a_path_selects_whose_messages_are_told(node: Node, path: str, told: int) -> None:
    here, other = await start(node, Counter(), "here"), await start(node, Counter(), "p")
    async with tracing(node, path) as seen:
        await here.ask(Add(amount=1))
        await other.ask(Add(amount=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(seen.all) == told


@pytest.mark.parametrize(("path", "told"), [("p", {"p"}), ("other", {"other"}), ("", {"p", "other", "here"})])
async def test_a_path_into_another_process(node: Node, path: str, told: set[str]) -> None:
    refs = [await node.spawn(process(name)) for name in ("p", "other")]
    refs.append(await start(node, Counter(), "here"))
    async with tracing(node, path, *refs) as seen:
        for ref in refs:
            await ref.ask(Add(amount=1))
        await seen.of("Add", len(told))
    assert {one.actor for one in seen.all} == told


async def test_a_path_to_below_another_process(node: Node) -> None:
    nest = await node.spawn(process("nest", actor="Nest"))
    async with tracing(node, "nest/inner") as seen:
        while not seen.all:  # that process is asked by the one in between
            await nest.ask(Add(amount=1))
    assert {one.actor for one in seen.all} == {"nest/inner"}


async def test_a_process_that_is_started_meanwhile_is_traced_too(node: Node) -> None:
    async with tracing(node) as seen:
        ref = await node.spawn(process("late"))
        await ref.ask(Total())
        await ref.ask(Add(amount=1))
        (one,) = await seen.of("Add")
    assert one.actor == "late"


async def test_a_process_on_another_machine_is_traced_too() -> None:
    async with tcp_node("there") as there, tcp_node("here") as here:
        machine = await here.reach(there.endpoint)
        spec = ProcessSpec(name="p", actor=f"{ZOO}:Counter", config=CounterConfig(), node=machine)
        ref = await here.spawn(spec)
        async with tracing(here, "p", ref) as seen:
            await ref.ask(Add(amount=1))
            (one,) = await seen.of("Add")
    assert one.actor == "p"


@pytest.mark.parametrize(
    ("message", "outcome"), [(Fail(text="no"), "ValueError: no"), (Crash(text="oh"), "ValueError: oh")]
)
async def test_errors_are_outcomes(node: Node, message: Fail | Crash, outcome: str) -> None:
    observer = await start(node, Observer(), "observer")
    ref = await start(node, Counter())
    await observer.tell(Observe(ref=ref))
    told: list[Traced] = []
    with node.trace(told.append):
        if isinstance(message, Fail):
            with pytest.raises(RemoteError, match="no"):
                await ref.ask(message)
        else:
            await ref.tell(message)
            await observer.ask(Observed(count=1))
    assert outcome in [one.outcome for one in told if one.actor == "a"]


async def test_a_cancelled_handler_is_told_as_such(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    told: list[Traced] = []
    with node.trace(told.append):
        hanging = asyncio.ensure_future(ref.ask(Hang()))
        await counter.hanging.wait()
        hanging.cancel()
        await ref.ask(Total())
        await ref.ask(Add(amount=0))
    assert [one.outcome for one in told if one.message == f"{ZOO}:Hang"] == ["cancelled"]


async def test_a_closed_stream_is_told_as_cancelled(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    told: list[Traced] = []
    with node.trace(told.append):
        async with aclosing(ref.stream(Count(upto=1000))) as items:
            await anext(items)
        await counter.hanging.wait()
        await asyncio.sleep(0)
    assert [one.outcome for one in told] == ["cancelled"]


async def test_off_a_trace_leaves_no_line_on_a_messages_way(node: Node) -> None:
    ref = await start(node, Counter())
    assert life(ref).table is Counter.table
    with node.trace(lambda one: None):
        assert life(ref).table is not Counter.table
    assert life(ref).table is Counter.table
    assert not node.probes.on


async def test_a_sink_that_raises_harms_nobody_and_is_asked_no_more(node: Node) -> None:
    ref = await start(node, Counter())
    calls: list[Traced] = []

    def broken(one: Traced) -> None:
        calls.append(one)
        raise ValueError("full")

    told: list[Traced] = []
    with node.trace(broken), node.trace(told.append):
        assert await ref.ask(Add(amount=1)) == 1
        assert await ref.ask(Add(amount=1)) == 2
    assert (len(calls), len(told)) == (1, 2)


async def test_who_reads_slowly_learns_how_much_was_lost(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.actors.looking.tracer.WAITING", 5)
    ref = await start(node, Counter())
    stream = node.desk().stream(Trace())
    opening = asyncio.ensure_future(anext(stream))
    await until(lambda: node.probes.on)
    await ref.ask(Add(amount=1))
    first = await opening
    for _ in range(100):
        await ref.ask(Add(amount=1))
    read = [first]
    while sum(1 + one.lost for one in read) < 101:
        await ref.ask(Add(amount=1))
        read.append(await anext(stream))
    assert any(one.lost for one in read)
    await stream.aclose()


async def test_the_trace_of_one_who_goes_away_ends(node: Node) -> None:
    ref = await node.spawn(process("p"))
    async with tracing(node):
        await ref.ask(Add(amount=1))
    await until(lambda: not node.probes.on)
