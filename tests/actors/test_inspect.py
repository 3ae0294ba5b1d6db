from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.actors import (
    Actor,
    Ask,
    AwaitChild,
    ChildSpec,
    Node,
    ProcessSpec,
    Ref,
    RemoteError,
    Supervisor,
    WhereIs,
    handles,
)
from gyre.actors.looking import ActorReport, HandlerReport, Inspect, NoSuchActor
from gyre.actors.looking.histogram import Histogram
from gyre.actors.looking.inspector import CHILDREN_SHOWN
from tests.actors.conftest import life, start, until
from tests.actors.test_reach import tcp_node
from tests.actors.zoo import (
    Add,
    Bump,
    Count,
    Counter,
    CounterConfig,
    Crash,
    Fail,
    Hang,
    Hold,
    NestConfig,
    Pid,
    Slow,
    Total,
)

ZOO = "tests.actors.zoo"


def process(name: str = "p", actor: str = "Counter", config: msgspec.Struct | None = None) -> ProcessSpec:
    config = config or CounterConfig()
    return ProcessSpec(name=name, actor=f"{ZOO}:{actor}", config=config, restart="temporary")


async def look(node: Node, path: str = "", within_s: float = 20.0) -> ActorReport:
    return await node.desk().ask(Inspect(path=path, within_s=within_s))


def below(report: ActorReport, path: str) -> ActorReport:
    """The one with that path."""
    for child in report.children:
        if child.path == path:
            return child
        if path.startswith(f"{child.path}/"):
            return below(child, path)
    raise LookupError(f"{path} in {[child.path for child in report.children]}")


def row(report: ActorReport, message: str) -> HandlerReport:
    return next(one for one in report.handlers if one.message == f"{ZOO}:{message}")


async def supervised(node: Node, *names: str) -> Ref:
    children = [ChildSpec(name=name, start=Counter) for name in names]
    return await node.spawn(ChildSpec(name="top", start=lambda: Supervisor(children), restart="temporary"))


# --- the tree -----------------------------------------------------------------------------------------


async def test_the_tree_of_a_node(node: Node) -> None:
    await supervised(node, "a", "b")
    await start(node, Counter(), "c")
    report = await look(node)
    assert [child.path for child in report.children] == ["top", "c"]
    assert [child.path for child in report.children[0].children] == ["top/a", "top/b"]
    assert below(report, "top/a").kind == f"{ZOO}:Counter"
    assert {child.state for child in report.children} == {"running"}
    assert report.node is not None
    assert (report.node.name, report.node.pid, report.node.actors) == ("test", os.getpid(), 4)
    assert below(report, "c").node is None


async def test_a_path_selects_what_lives_there(node: Node) -> None:
    await supervised(node, "a", "b")
    assert [child.path for child in (await look(node, "top")).children] == ["top/a", "top/b"]
    report = await look(node, "top/b")
    assert (report.path, report.children) == ("top/b", ())


async def test_a_path_that_leads_nowhere_names_what_there_is(node: Node) -> None:
    await supervised(node, "a", "b")
    with pytest.raises(NoSuchActor, match="no actor 'top/x': top has a, b") as raised:
        await look(node, "top/x")
    assert raised.value.living == ["a", "b"]
    with pytest.raises(NoSuchActor, match="no actor 'x': there are top"):
        await look(node, "x/y")
    with pytest.raises(NoSuchActor, match="no actor 'top/a/x': top/a has none below it"):
        await look(node, "top/a/x")


async def test_the_tree_goes_on_in_other_processes(node: Node) -> None:
    await node.spawn(process("nest", "Nest", NestConfig()))
    report = await look(node)
    nest, inner = below(report, "nest"), below(report, "nest/inner")
    assert nest.node is not None and inner.node is not None and report.node is not None
    assert len({report.node.pid, nest.node.pid, inner.node.pid}) == 3
    assert (nest.kind, inner.kind) == (f"{ZOO}:Nest", f"{ZOO}:Counter")
    assert nest.node.peers == ("inner", "test")
    for path in ("nest", "nest/inner"):
        assert (await look(node, path)).path == path
    with pytest.raises(NoSuchActor, match="no actor 'nest/x': nest has inner"):
        await look(node, "nest/x")
    with pytest.raises(NoSuchActor, match="no actor 'nest/inner/x'"):
        await look(node, "nest/inner/x")


async def test_a_process_that_does_not_answer_is_shown_as_such(node: Node) -> None:
    await start(node, Counter(), "here")
    ref = await node.spawn(process("stuck"))
    pid = await ref.ask(Pid())
    os.kill(pid, signal.SIGSTOP)
    try:
        report = await look(node, within_s=0.5)
        assert below(report, "here").state == "running"
        assert below(report, "stuck").state == "unanswered"
        assert below(report, "stuck").why == "no answer within 0.45 s"
        assert below(report, "stuck").kind == f"{ZOO}:Counter"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert below(await look(node), "stuck").state == "running"


async def test_an_actor_that_stops_is_shown_so(node: Node) -> None:
    go = asyncio.Event()

    class Lingering(Counter):
        async def stopping(self) -> None:
            await go.wait()

    ref = await start(node, Lingering(), shutdown_s=20.0)
    stopping = asyncio.ensure_future(node.stop(ref))
    await until(lambda: life(ref).exit is not None)
    assert (await look(node, "a")).state == "stopping"
    go.set()
    await stopping


async def test_of_very_many_children_not_all_are_shown(node: Node) -> None:
    for number in range(CHILDREN_SHOWN + 3):
        await start(node, Counter(), f"a{number}")
    report = await look(node)
    assert (len(report.children), report.hidden) == (CHILDREN_SHOWN, 3)
    assert (await look(node, f"a{CHILDREN_SHOWN + 2}")).state == "running"


async def test_a_process_on_another_machine_is_part_of_the_tree() -> None:
    async with tcp_node("there") as there, tcp_node("here") as here:
        machine = await here.reach(there.endpoint)
        spec = ProcessSpec(name="nest", actor=f"{ZOO}:Nest", config=NestConfig(), node=machine)
        await here.spawn(ChildSpec(name="top", start=lambda: Supervisor([spec]), restart="temporary"))
        report = await look(here)
        assert below(report, "top/nest/inner").kind == f"{ZOO}:Counter"
        assert (await look(here, "top/nest/inner")).state == "running"
        nest = below(report, "top/nest")
        assert nest.node is not None and "there" in nest.node.peers
        assert (await look(there)).children == ()


# --- mailboxes and what is handled ----------------------------------------------------------------------


async def test_what_waits_and_what_is_handled(node: Node) -> None:
    ref = await start(node, Slow(), mailbox=3)
    await ref.tell(Hold())
    await asyncio.sleep(0)
    for _ in range(3):
        await ref.tell(Bump())
    waiting = asyncio.ensure_future(ref.tell(Bump()))
    await asyncio.sleep(0)
    report = await look(node, "a")
    assert (report.waiting, report.capacity, report.writers) == (3, 3, 1)
    assert [one.message for one in report.handling] == [f"{ZOO}:Hold"]
    assert report.handling[0].for_s is None  # it began before anybody looked
    waiting.cancel()


async def test_how_long_a_message_is_being_handled(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    await look(node)
    hanging = asyncio.ensure_future(ref.ask(Hang()))
    await counter.hanging.wait()
    (handling,) = (await look(node, "a")).handling
    assert handling.message == f"{ZOO}:Hang"
    assert handling.for_s is not None and 0 <= handling.for_s < 5
    hanging.cancel()


# --- counters -------------------------------------------------------------------------------------------


async def test_handlers_are_counted_from_the_first_look_on(node: Node) -> None:
    ref = await start(node, Counter())
    await ref.ask(Add(amount=1))
    assert (await look(node, "a")).handlers == ()
    for _ in range(5):
        await ref.ask(Add(amount=1))
    await ref.tell(Bump())
    await ref.ask(Total())
    with pytest.raises(RemoteError):
        await ref.ask(Fail(text="no"))
    assert [item async for item in ref.stream(Count(upto=3))] == [0, 1, 2]
    report = await look(node, "a")
    assert (row(report, "Add").count, row(report, "Add").failed) == (5, 0)
    assert (row(report, "Fail").count, row(report, "Fail").failed) == (1, 1)
    assert row(report, "Bump").count == row(report, "Total").count == row(report, "Count").count == 1
    add = row(report, "Add")
    assert 0 < add.seconds / 5 <= add.p99_s * 1.0001


async def test_lives_that_begin_later_are_counted_too(node: Node) -> None:
    await look(node)
    ref = await start(node, Counter())
    await ref.ask(Add(amount=1))
    assert row(await look(node, "a"), "Add").count == 1


async def test_asks_of_other_processes_are_counted(node: Node) -> None:
    ref = await node.spawn(process())
    await look(node)
    for _ in range(3):
        await ref.ask(Add(amount=1))
    assert row(await look(node, "p"), "Add").count == 3


async def test_nobody_counts_when_nobody_has_looked_for_a_while(node: Node) -> None:
    ref = await start(node, Counter())
    plain = life(ref).table
    assert plain is Counter.table
    node.probes.count(for_s=0.01)
    assert life(ref).table is not plain
    await until(lambda: not node.probes.on)
    assert life(ref).table is plain
    assert await ref.ask(Add(amount=1)) == 1


async def test_a_message_under_way_while_counting_begins_is_answered(node: Node) -> None:
    slow = Slow()
    ref = await start(node, slow)
    await ref.tell(Hold())
    await asyncio.sleep(0)
    total = asyncio.ensure_future(ref.ask(Total()))
    await asyncio.sleep(0)
    await look(node)
    slow.gate.set()
    assert await total == 0
    await ref.tell(Bump())
    assert await ref.ask(Total()) == 1


@given(st.lists(st.floats(min_value=1e-8, max_value=1e5), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_at_most_a_quarter_too_high(durations_s: list[float], part: float) -> None:
    histogram = Histogram()
    for duration_s in durations_s:
        histogram.add(duration_s)
    exact = sorted(durations_s)[math.ceil(part * len(durations_s)) - 1]
    assert exact <= histogram.quantile_s(part) <= exact * 1.2501
    assert histogram.count == len(durations_s)
    assert histogram.sum_s == pytest.approx(sum(durations_s))


def test_a_histogram_of_nothing_and_of_no_time() -> None:
    histogram = Histogram()
    assert histogram.quantile_s(0.99) == 0.0
    histogram.add(0.0)
    assert histogram.quantile_s(0.99) < 1e-8


# --- errors, restarts, dead letters -----------------------------------------------------------------------


async def test_the_last_error_that_an_asker_was_told(node: Node) -> None:
    ref = await start(node, Counter())
    for text in ("first", "second"):
        with pytest.raises(RemoteError):
            await ref.ask(Fail(text=text))
    report = await look(node, "a")
    assert report.last_error is not None
    assert report.last_error.error == "ValueError: second"
    assert report.last_error.message == f"{ZOO}:Fail"
    assert "raise ValueError(message.text)" in report.last_error.traceback
    assert 0 <= report.last_error.ago_s < 10
    assert report.restarts == 0


async def test_restarts_and_the_end_of_the_life_before(node: Node) -> None:
    top = await supervised(node, "a")
    first = await top.ask(WhereIs(name="a"))
    assert first is not None
    await first.tell(Crash(text="on purpose"))
    await top.ask(AwaitChild(name="a", after=first))
    report = await look(node, "top/a")
    assert (report.restarts, report.incarnation) == (1, 2)
    assert report.last_error is not None
    assert report.last_error.error == "ValueError: on purpose"
    assert report.last_error.message == ""


async def test_dead_letters_are_part_of_the_answer(node: Node) -> None:
    ref = await start(node, Counter())
    await node.stop(ref)
    await ref.tell(Bump())
    report = await look(node)
    assert report.node is not None
    assert report.node.dead_letters == 1
    (letter,) = report.node.last_dead_letters
    assert (letter.to, letter.message, letter.why) == ("a#1", f"{ZOO}:Bump", "stopped")


# --- summaries ----------------------------------------------------------------------------------------


class Telling(Actor):
    def __init__(self, told: Any) -> None:
        self.told = told

    def summary(self) -> Mapping[str, Any]:
        if isinstance(self.told, Exception):
            raise self.told
        return {"told": self.told}


@pytest.mark.parametrize(
    ("told", "seen"),
    [
        (3, {"told": 3}),
        (["one", 2], {"told": ["one", 2]}),
        (Path("/x"), {"told": "/x"}),
        (ValueError("not now"), {"summary_failed": "ValueError: not now"}),
        ("x" * 1000, {"told": "x" * 500 + "..."}),
    ],
)
async def test_what_an_actor_says_of_itself(node: Node, told: Any, seen: dict[str, Any]) -> None:
    await start(node, Telling(told))
    assert (await look(node, "a")).summary == seen


# --- no trace is left ---------------------------------------------------------------------------------


async def test_looking_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    async with Node(name="test") as node:
        await start(node, Counter())
        await look(node)
    assert asyncio.all_tasks() == before
    assert node.lives == {}


class LookAtYourself(Ask[ActorReport], frozen=True, kw_only=True):
    pass


class Curious(Actor):
    @handles(LookAtYourself)
    async def look(self, message: LookAtYourself) -> ActorReport:
        return await self.context.node.desk().ask(Inspect(path=self.context.name))


async def test_an_actor_can_look_at_itself(node: Node) -> None:
    report = await (await start(node, Curious())).ask(LookAtYourself())
    assert [one.message for one in report.handling] == [f"{__name__}:LookAtYourself"]
