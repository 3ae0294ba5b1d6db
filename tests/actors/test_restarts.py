"""Restarts and stops that meet: no child is forgotten, none lives unknown, none is lost without a word."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from gyre.actors import (
    Actor,
    AwaitChild,
    ChildSpec,
    Follow,
    Node,
    NodeFailed,
    ProcessSpec,
    Ref,
    Restarted,
    SpawnFailed,
    Supervision,
    Supervisor,
    Tell,
    WhereIs,
    handles,
)
from gyre.actors.specs import Restart
from tests.actors.conftest import life, start
from tests.actors.zoo import Add, Counter, CounterConfig, Crash, Quit, Shop


class Deaf(Actor):
    @handles(Restarted)
    async def restarted(self, message: Restarted) -> None:
        await asyncio.Event().wait()


class StopChild(Tell, frozen=True, kw_only=True):
    ref: Ref


class Keeper(Actor):
    """Has one child, which it can stop."""

    supervision = Supervision(max_restarts=1000)

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.stopped = asyncio.Event()

    async def started(self) -> None:
        self.child = await self.context.spawn(self.spec)

    @handles(StopChild)
    async def stop_child(self, message: StopChild) -> None:
        await self.context.stop_child(message.ref)
        self.stopped.set()


async def test_a_child_stopped_between_two_lives_stays_away(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.actors.supervision.FIRST_DELAY_S", 0.05)
    keeper = Keeper(ChildSpec(name="child", start=Counter))
    parent = await start(node, keeper)
    ended = life(keeper.child).ended
    await keeper.child.tell(Crash())
    await ended
    await asyncio.sleep(0.01)  # it waits to be restarted
    await parent.tell(StopChild(ref=keeper.child))
    async with asyncio.timeout(20):
        await keeper.stopped.wait()
    await asyncio.sleep(0.1)
    assert [life.ref.name for life in node.lives.values()] == ["a"]


async def test_a_child_stopped_while_it_starts_again_is_gone_when_stop_returns(node: Node) -> None:
    starting = asyncio.Event()
    lives: list[str] = []

    class SlowStart(Counter):
        async def started(self) -> None:
            if self.context.incarnation == 2:
                starting.set()
                await asyncio.sleep(0.05)
            lives.append("+")

        async def stopping(self) -> None:
            lives.append("-")

    keeper = Keeper(ChildSpec(name="child", start=SlowStart))
    parent = await start(node, keeper)
    await keeper.child.tell(Crash())
    await starting.wait()
    await parent.tell(StopChild(ref=keeper.child))
    async with asyncio.timeout(20):
        await keeper.stopped.wait()
    assert [life.ref.name for life in node.lives.values()] == ["a"]
    await asyncio.sleep(0.1)
    assert [life.ref.name for life in node.lives.values()] == ["a"]


async def test_children_stop_in_order_though_their_parents_stopping_fails(node: Node) -> None:
    log: list[str] = []

    class Logged(Actor):
        async def stopping(self) -> None:
            await asyncio.sleep(0)
            log.append(self.context.name)

    class Careless(Actor):
        async def started(self) -> None:
            for name in "abc":
                await self.context.spawn(ChildSpec(name=name, start=Logged))

        async def stopping(self) -> None:
            raise ValueError("no")

    ref = await start(node, Careless(), "parent")
    await node.stop(ref)
    assert log == ["c", "b", "a"]


async def test_children_are_gone_when_their_killed_parent_is(node: Node) -> None:
    gone: list[bool] = []

    class Lingers(Actor):
        async def stopping(self) -> None:
            await asyncio.Event().wait()

        @handles(Crash)
        async def crash(self, message: Crash) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(3):
                    await asyncio.sleep(0)

    class Parent(Actor):
        async def started(self) -> None:
            self.child = await self.context.spawn(ChildSpec(name="child", start=Lingers))
            await self.child.tell(Crash())
            life(self.context.ref).ended.add_done_callback(
                lambda _: gone.append(life(self.child).ended.done())
            )

    parent = Parent()
    ref = await start(node, parent, "parent", shutdown_s=0.05)
    await asyncio.sleep(0.01)
    await node.stop(ref)
    assert gone == [True]


async def test_who_gives_up_a_start_waits_until_it_is_undone(node: Node) -> None:
    class SlowToGo(Actor):
        async def started(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(3):
                    await asyncio.sleep(0)

    spawning = asyncio.ensure_future(node.spawn(ChildSpec(name="x", start=SlowToGo)))
    await asyncio.sleep(0.01)
    spawning.cancel()
    await asyncio.wait([spawning])
    assert node.lives == {}


async def test_a_process_that_cannot_be_made_is_the_spawners_error(node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = ProcessSpec(
        name="x",
        actor="tests.actors.zoo:Counter",
        config=CounterConfig(),
        log_path=tmp_path / "file" / "log",
    )
    for _ in range(2):
        with pytest.raises(SpawnFailed, match="FileExistsError"):
            await node.spawn(spec)
    assert node.processes.all() == []


async def test_a_config_that_cannot_travel_is_the_spawners_error(node: Node) -> None:
    bad = CounterConfig(start=object())  # type: ignore[arg-type]
    with pytest.raises(SpawnFailed, match="cannot travel"):
        await node.spawn(ProcessSpec(name="x", actor="tests.actors.zoo:Counter", config=bad))
    assert node.processes.all() == []


async def test_a_process_that_cannot_be_made_again_fails_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk is full, descriptors are used up: not a child that is gone without a word."""
    with pytest.raises(NodeFailed, match="No space left"):
        async with asyncio.timeout(20), Node(name="test", supervision=Supervision(max_restarts=2)) as node:
            spec = ProcessSpec(name="x", actor="tests.actors.zoo:Counter", config=CounterConfig())
            ref = await node.spawn(spec)

            def full(*_: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr("gyre.actors.carrier.Output", full)
            await ref.tell(Crash())
            await node.failed()


async def test_a_child_that_cannot_start_for_long_is_tried_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each frame of Python's stack."""
    monkeypatch.setattr("gyre.actors.supervision.FIRST_DELAY_S", 0.0)
    tries = 0
    up = asyncio.Event()

    class Late(Counter):
        async def started(self) -> None:
            nonlocal tries
            tries += 1
            if 1 < tries < 1500:
                raise OSError("the disk is not mounted yet")
            if tries >= 1500:
                up.set()

    spec = ChildSpec(name="late", start=Late)
    await start(node, Supervisor([spec], max_restarts=10**6), "top")
    late = node.lookup("top/late")
    assert late is not None
    await late.tell(Crash())
    async with asyncio.timeout(30):
        await up.wait()
    await asyncio.sleep(0)
    late = node.lookup("top/late")
    assert late is not None
    assert await late.ask(Add(amount=1)) == 1


@pytest.mark.parametrize("restart", ["transient", "temporary"])
async def test_one_that_leaves_at_its_start_does_not_keep_the_next_from_theirs(
    node: Node, restart: Restart
) -> None:
    class Leaves(Counter):
        async def started(self) -> None:
            if self.context.incarnation == 2:
                self.context.stop()

    specs = [
        ChildSpec(name="first", start=Counter),
        ChildSpec(name="leaves", start=Leaves, restart=restart),
        ChildSpec(name="last", start=Counter),
    ]
    top = await start(node, Supervisor(specs, "rest_for_one"), "top")
    first = await top.ask(WhereIs(name="first"))
    last = await top.ask(WhereIs(name="last"))
    assert first is not None
    await first.tell(Crash())
    async with asyncio.timeout(20):
        assert (await top.ask(AwaitChild(name="last", after=last))).incarnation == 2


async def test_a_follower_that_reads_nothing_does_not_take_the_supervisor_down(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.actors.supervisor.FOLLOWER_WAIT_S", 0.01)
    deaf = Deaf()
    follower = await start(node, deaf, "follower", mailbox=1)
    stranger = await start(node, Counter(), "stranger")  # does not even know the message
    top = await start(node, Supervisor([ChildSpec(name="c", start=Counter)], max_restarts=1000), "top")
    await top.tell(Follow(watcher=follower))
    await top.tell(Follow(watcher=stranger))
    child = await top.ask(AwaitChild(name="c"))
    async with asyncio.timeout(20):
        for _ in range(4):
            await child.tell(Crash())
            child = await top.ask(AwaitChild(name="c", after=child))
    assert life(top).exit is None


async def test_followers_that_are_gone_are_forgotten(node: Node) -> None:
    supervisor = Supervisor([])
    top = await start(node, supervisor, "top")
    for number in range(3):
        follower = await start(node, Shop() if number % 2 else Counter(), f"f{number}")
        for _ in range(2):
            await top.tell(Follow(watcher=follower))
        await top.ask(WhereIs(name="x"))
        assert len(supervisor._followers) == 1
        await node.stop(follower)
        await top.ask(WhereIs(name="x"))
    assert len(supervisor._followers) == 0


async def test_what_a_dead_actor_spawns_does_not_live(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    context = counter.context
    await ref.tell(Quit())
    await life(ref).ended
    with pytest.raises(SpawnFailed, match="stopping"):
        await context.spawn(ChildSpec(name="late", start=Counter))
    assert node.lives == {}
