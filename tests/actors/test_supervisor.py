from __future__ import annotations

import asyncio
import random

import pytest

from gyre.actors import (
    Actor,
    ActorDied,
    AwaitChild,
    ChildSpec,
    Follow,
    Node,
    NodeFailed,
    Ref,
    RemoteError,
    Restarted,
    SpawnFailed,
    Spec,
    Supervision,
    Supervisor,
    WhereIs,
    handles,
)
from gyre.actors.specs import Restart, Strategy
from gyre.actors.testing import Simulation
from tests.actors.conftest import start
from tests.actors.zoo import Add, Counter, Crash, Incarnation, Observe, Observed, Observer, Quit


class Logged(Counter):
    """Writes its start and its stop into a log that all share."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    async def started(self) -> None:
        self.log.append(f"+{self.context.name}")

    async def stopping(self) -> None:
        self.log.append(f"-{self.context.name}")


class Follower(Actor):
    def __init__(self) -> None:
        self.restarts: asyncio.Queue[Restarted] = asyncio.Queue()

    @handles(Restarted)
    async def restarted(self, message: Restarted) -> None:
        self.restarts.put_nowait(message)


def children(log: list[str], restart: Restart = "permanent") -> list[Spec]:
    return [ChildSpec(name=name, start=lambda: Logged(log), restart=restart) for name in "abc"]


async def supervised(
    node: Node, log: list[str], strategy: Strategy = "one_for_one", restart: Restart = "permanent"
) -> tuple[Ref, Follower]:
    follower = Follower()
    follows = await start(node, follower, "follower")
    spec = ChildSpec(name="top", start=lambda: Supervisor(children(log, restart), strategy))
    top = await node.spawn(spec)
    await top.tell(Follow(watcher=follows))
    return top, follower


async def child(top: Ref, name: str) -> Ref:
    ref = await top.ask(WhereIs(name=name))
    assert ref is not None
    return ref


async def test_children_start_in_order_and_stop_in_reverse() -> None:
    log: list[str] = []
    async with Node(name="test") as node:
        await node.spawn(ChildSpec(name="top", start=lambda: Supervisor(children(log))))
        assert log == ["+a", "+b", "+c"]
        log.clear()
    assert log == ["-c", "-b", "-a"]


@pytest.mark.parametrize(
    ("strategy", "happened"),
    [
        ("one_for_one", ["-b", "+b"]),
        ("rest_for_one", ["-b", "-c", "+b", "+c"]),
        ("one_for_all", ["-b", "-c", "-a", "+a", "+b", "+c"]),
    ],
)
async def test_a_crash_restarts_those_the_strategy_names(
    node: Node, strategy: Strategy, happened: list[str]
) -> None:
    log: list[str] = []
    top, follower = await supervised(node, log, strategy)
    log.clear()
    await (await child(top, "b")).tell(Crash())
    for _ in range(len(happened) // 2):
        await follower.restarts.get()
    assert log == happened


async def test_the_next_life_keeps_the_name_and_counts_on(node: Node) -> None:
    top, follower = await supervised(node, [])
    old = await child(top, "b")
    await old.ask(Add(amount=5))
    await old.tell(Crash())
    restarted = await follower.restarts.get()
    new = await child(top, "b")
    assert (restarted.name, restarted.old, restarted.ref) == ("b", old, new)
    assert restarted.reason.message == "crash"
    assert new.label == "b#2"
    assert await new.ask(Incarnation()) == 2
    assert await new.ask(Add(amount=1)) == 1


async def test_a_ref_to_a_former_life_never_reaches_the_next(node: Node) -> None:
    top, follower = await supervised(node, [])
    old = await child(top, "b")
    await old.tell(Crash(text="first life"))
    await follower.restarts.get()
    with pytest.raises(ActorDied, match=r"b#1 died: ValueError: first life"):
        await old.ask(Add(amount=1))


async def test_transient_children_may_leave(node: Node) -> None:
    log: list[str] = []
    top, _ = await supervised(node, log, restart="transient")
    observer = await start(node, Observer(), "observer")
    leaving = await child(top, "b")
    await observer.tell(Observe(ref=leaving))
    await observer.ask(Observed(count=0))
    await leaving.tell(Quit())
    await observer.ask(Observed(count=1))
    await asyncio.sleep(0)
    assert await top.ask(WhereIs(name="b")) is None
    assert log == ["+a", "+b", "+c", "-b"]


async def test_too_many_restarts_fail_the_supervisor_and_then_its_parent() -> None:
    starts: list[str] = []

    class CrashesSoon(Actor):
        async def started(self) -> None:
            starts.append(self.context.ref.label)
            self.context.tell_after(0, Crash())

        @handles(Crash)
        async def crash(self, message: Crash) -> None:
            raise ValueError("never again")

    child = ChildSpec(name="a", start=CrashesSoon)
    with pytest.raises(NodeFailed, match=r"top#4 died.* a#2 died: ValueError: never again") as caught:
        async with Node(name="test") as node:
            await node.spawn(ChildSpec(name="top", start=lambda: Supervisor([child], max_restarts=1)))
            await node.failed()
    assert starts == ["a#1", "a#2"] * 4
    assert "in crash" in caught.value.reason.traceback


async def test_an_actor_learns_of_its_own_childrens_next_lives(node: Node) -> None:
    class Parent(Follower):
        async def started(self) -> None:
            self.child = await self.context.spawn(ChildSpec(name="child", start=Counter))

    parent = Parent()
    await start(node, parent, "parent")
    await parent.child.tell(Crash())
    restarted = await parent.restarts.get()
    assert restarted.old == parent.child
    assert parent.context.child("child") == restarted.ref
    assert node.lookup("parent/child") == restarted.ref
    assert node.lookup("parent/nobody") is None


async def test_stopping_during_a_restart_leaves_nothing(node: Node) -> None:
    starting_again = asyncio.Event()

    class SlowStart(Counter):
        async def started(self) -> None:
            if self.context.incarnation == 2:
                starting_again.set()
                await asyncio.Event().wait()

    top = await node.spawn(
        ChildSpec(name="top", start=lambda: Supervisor([ChildSpec(name="a", start=SlowStart)]))
    )
    await (await child(top, "a")).tell(Crash())
    await starting_again.wait()
    async with asyncio.timeout(20):
        await node.stop(top)
    await asyncio.sleep(0)
    assert node.lives == {}


async def test_who_waits_for_a_child_gets_its_next_life(node: Node) -> None:
    top, _ = await supervised(node, [])
    old = await top.ask(AwaitChild(name="b"))
    assert old == await child(top, "b")
    waiting = asyncio.ensure_future(top.ask(AwaitChild(name="b", after=old)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await old.tell(Crash())
    assert (await waiting).label == "b#2"


async def test_waiting_for_a_child_that_never_was_is_an_error(node: Node) -> None:
    top, _ = await supervised(node, [])
    with pytest.raises(RemoteError, match="top has no child 'd'"):
        await top.ask(AwaitChild(name="d"))


class Parent(Actor):
    """Its children come when they are told of."""

    def __init__(self, strategy: Strategy) -> None:
        self.supervision = Supervision(strategy)
        self.restarts: asyncio.Queue[Restarted] = asyncio.Queue()

    @handles(Restarted)
    async def restarted(self, message: Restarted) -> None:
        self.restarts.put_nowait(message)


async def test_dynamic_children_come_after_those_that_were_there(node: Node) -> None:
    """rest_for_one: order is that of the spawns, also of one that left and came again."""
    log: list[str] = []
    parent = Parent("rest_for_one")
    await start(node, parent, "parent")
    for name in "abc":
        await parent.context.spawn(ChildSpec(name=name, start=lambda: Logged(log)))
    a = parent.context.child("a")
    assert a is not None
    await parent.context.stop_child(a)
    a = await parent.context.spawn(ChildSpec(name="a", start=lambda: Logged(log)))
    log.clear()
    c = parent.context.child("c")
    assert c is not None
    await c.tell(Crash())
    assert [(await parent.restarts.get()).name for _ in range(2)] == ["c", "a"]
    assert log == ["-c", "-a", "+c", "+a"]
    assert (await a.target.ended).kind == "stopped"  # type: ignore[attr-defined]


async def test_temporary_children_go_with_the_others_and_stay_away(node: Node) -> None:
    log: list[str] = []
    parent = Parent("one_for_all")
    await start(node, parent, "parent")
    refs = {}
    for name, restart in (("a", "permanent"), ("b", "temporary"), ("c", "permanent")):
        spec = ChildSpec(name=name, start=lambda: Logged(log), restart=restart)  # type: ignore[arg-type]
        refs[name] = await parent.context.spawn(spec)
    log.clear()
    await refs["c"].tell(Crash())
    assert [(await parent.restarts.get()).name for _ in range(2)] == ["a", "c"]
    assert log == ["-c", "-b", "-a", "+a", "+c"]
    assert parent.context.child("b") is None
    again = ChildSpec(name="b", start=lambda: Logged(log), restart="temporary")
    assert (await parent.context.spawn(again)).incarnation == 1


async def test_a_temporary_childs_end_restarts_nobody(node: Node) -> None:
    log: list[str] = []
    parent = Parent("one_for_all")
    await start(node, parent, "parent")
    await parent.context.spawn(ChildSpec(name="a", start=lambda: Logged(log)))
    b = await parent.context.spawn(ChildSpec(name="b", start=lambda: Logged(log), restart="temporary"))
    observer = await start(node, Observer(), "observer")
    await observer.tell(Observe(ref=b))
    await observer.ask(Observed(count=0))
    await b.tell(Crash())
    await observer.ask(Observed(count=1))
    c = await parent.context.spawn(ChildSpec(name="c", start=lambda: Logged(log)))
    await c.tell(Crash())
    assert (await parent.restarts.get()).name == "a"
    assert log[:4] == ["+a", "+b", "-b", "+c"]


async def test_a_child_that_is_spawned_while_the_others_restart_lives_once(node: Node) -> None:
    log: list[str] = []
    parent = Parent("one_for_all")
    await start(node, parent, "parent")
    a = await parent.context.spawn(ChildSpec(name="a", start=lambda: Logged(log)))
    begun, go = asyncio.Event(), asyncio.Event()

    class Slow(Logged):
        async def started(self) -> None:
            begun.set()
            await go.wait()
            await super().started()

    spawning = asyncio.create_task(parent.context.spawn(ChildSpec(name="slow", start=lambda: Slow(log))))
    await begun.wait()
    await a.tell(Crash())
    await asyncio.wait([a.target.ended])  # type: ignore[attr-defined]
    go.set()
    (failed,) = await asyncio.gather(spawning, return_exceptions=True)
    assert (await parent.restarts.get()).name == "a"
    slow = parent.context.child("slow")
    assert (slow is None) == isinstance(failed, SpawnFailed)
    assert log.count("+slow") - log.count("-slow") == (slow is not None)


class Coin(random.Random):
    """Always the same draw."""

    def __init__(self, draw: float) -> None:
        super().__init__()
        self._draw = draw

    def random(self) -> float:
        return self._draw


@pytest.mark.parametrize(("draw", "factor"), [(0.0, 0.5), (0.5, 1.0), (0.999, 1.499)])
def test_back_off_doubles_and_its_jitter_is_a_half_to_one_and_a_half(draw: float, factor: float) -> None:
    async def scenario(sim: Simulation) -> list[float]:
        host, waits = sim.host("root"), []

        async def root() -> None:
            node = sim.node("root", host)
            node.rng = Coin(draw)
            async with node:
                parent = Parent("one_for_one")
                parent.supervision = Supervision(max_restarts=9)
                await start(node, parent, "parent")
                child = await parent.context.spawn(ChildSpec(name="c", start=Counter))
                for _ in range(9):
                    await child.tell(Crash())
                    await asyncio.wait([child.target.ended])  # type: ignore[attr-defined]
                    died = sim.loop.time()
                    child = (await parent.restarts.get()).ref
                    waits.append(sim.loop.time() - died)

        await sim.start(host, root())
        return waits

    waits = Simulation(seed=1).run(scenario)
    expected = [min(0.01 * 2**n, 1.0) * factor for n in range(9)]
    assert waits == pytest.approx(expected, abs=1e-3)


async def test_a_child_that_is_stopped_while_it_is_restarted_stays_away(node: Node) -> None:
    class Slow(Actor):
        """From its second life on it takes its time to start."""

        async def started(self) -> None:
            if self.context.incarnation > 1:
                starting.set()
                await go_on.wait()

        @handles(Crash)
        async def crash(self, message: Crash) -> None:
            raise ValueError(message.text)

    starting, go_on = asyncio.Event(), asyncio.Event()
    ref = await node.spawn(ChildSpec(name="slow", start=Slow))
    await ref.tell(Crash())
    await starting.wait()
    await node.stop(ref)
    go_on.set()
    await asyncio.sleep(0.05)
    assert node.lookup("slow") is None
    assert [life.ref.name for life in node.lives.values()] == []
