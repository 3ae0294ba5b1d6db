"""Links: what one dies of, the other dies of."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from gyre.actors import (
    Actor,
    ActorDied,
    Ask,
    ChildSpec,
    Down,
    ExitReason,
    Node,
    ProcessSpec,
    Ref,
    Tell,
    handles,
)
from gyre.actors.testing import Simulation, run_seeds
from tests.actors.conftest import life, start
from tests.actors.zoo import Observe, Observed, Observer


class Link(Tell, frozen=True, kw_only=True):
    ref: Ref


class Unlink(Tell, frozen=True, kw_only=True):
    ref: Ref


class Break(Tell, frozen=True, kw_only=True):
    pass


class Leave(Tell, frozen=True, kw_only=True):
    pass


class Settled(Ask[int], frozen=True, kw_only=True):
    """All that was told before is done; the process id."""


class Friend(Actor):
    @handles(Link)
    async def link(self, message: Link) -> None:
        self.context.link(message.ref)

    @handles(Unlink)
    async def unlink(self, message: Unlink) -> None:
        self.context.unlink(message.ref)

    @handles(Break)
    async def broken(self, _: Break) -> None:
        raise LookupError("it broke")

    @handles(Leave)
    async def leave(self, _: Leave) -> None:
        self.context.stop()

    @handles(Settled)
    async def settled(self, _: Settled) -> int:
        return os.getpid()


@pytest.fixture
async def friends(node: Node) -> AsyncIterator[tuple[Ref, Ref, Ref]]:
    """Three in a row, linked one with the next. Somebody monitors each, so that no crash fails the node."""
    observer = await start(node, Observer(), "observer")
    a, b, c = [await start(node, Friend(), name) for name in "abc"]
    for ref in (a, b, c):
        await observer.tell(Observe(ref=ref))
    await observer.ask(Observed(count=0))
    await a.tell(Link(ref=b))
    await b.tell(Link(ref=c))
    for ref in (a, b, c):
        await ref.ask(Settled())
    yield a, b, c


async def end_of(ref: Ref) -> ExitReason:
    return await asyncio.shield(life(ref).ended)


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_all_that_are_linked_die_of_one_crash(friends: tuple[Ref, Ref, Ref], first: int) -> None:
    ends = [life(ref).ended for ref in friends]
    await friends[first].tell(Break())
    reasons = await asyncio.gather(*ends)
    assert [reason.abnormal for reason in reasons] == [True] * 3
    assert {reason.first.message for reason in reasons} == {"it broke"}
    if first == 0:
        assert reasons[2].message.startswith("b#1, which it is linked with, died")


async def test_one_that_leaves_or_is_stopped_takes_nobody_with_it(
    node: Node, friends: tuple[Ref, Ref, Ref]
) -> None:
    a, b, c = friends
    await a.tell(Leave())
    assert not (await end_of(a)).abnormal
    await node.stop(c)
    await b.ask(Settled())
    assert life(b).exit is None


@pytest.mark.parametrize("who", [0, 1])
async def test_either_takes_a_link_back(friends: tuple[Ref, Ref, Ref], who: int) -> None:
    a, b, c = friends
    await (a, b)[who].tell(Unlink(ref=(b, a)[who]))
    await (a, b)[who].ask(Settled())
    end = life(c).ended
    await b.tell(Break())
    await end
    await a.ask(Settled())
    assert not life(a).watchers._tell or len(life(a).watchers._tell) == 1  # only the observer


async def test_a_link_with_the_dead_is_death_where_it_died_abnormally(
    node: Node, friends: tuple[Ref, Ref, Ref]
) -> None:
    a, _, _ = friends
    await a.tell(Break())
    await end_of(a)
    observer = node.lookup("observer")
    assert observer is not None
    await observer.ask(Observed(count=3))
    late, gone = await start(node, Friend(), "late"), await start(node, Friend(), "gone")
    await observer.tell(Observe(ref=late))
    await gone.tell(Leave())
    await end_of(gone)
    await late.tell(Link(ref=gone))
    await late.ask(Settled())
    end = life(late).ended
    await late.tell(Link(ref=a))
    assert (await end).first.message == "it broke"


class Both(Friend):
    """Monitors what it is linked with."""

    def __init__(self) -> None:
        self.downs = 0

    @handles(Down)
    async def down(self, _: Down) -> None:
        self.downs += 1


async def test_a_linked_actor_is_told_only_where_it_monitors(node: Node) -> None:
    both, friend = Both(), await start(node, Friend(), "friend")
    ref = await start(node, both, "both")
    both.context.link(friend)
    await friend.tell(Leave())
    await end_of(friend)
    await ref.ask(Settled())
    assert both.downs == 0
    other = await start(node, Friend(), "other")
    both.context.link(other)
    both.context.monitor(other)
    both.context.demonitor(other)
    end = life(ref).ended
    await node.spawn(ChildSpec(name="observer", start=Observer))
    observer = node.lookup("observer")
    assert observer is not None
    for watched in (ref, other):
        await observer.tell(Observe(ref=watched))
    await observer.ask(Observed(count=0))
    await other.tell(Break())
    assert (await end).abnormal
    assert both.downs == 0


async def test_nobody_is_linked_with_itself(node: Node) -> None:
    friend = Friend()
    ref = await start(node, friend)
    with pytest.raises(ValueError, match="cannot be linked with itself"):
        friend.context.link(ref)


async def far_friend(node: Node, observer: Ref) -> Ref:
    spec = ProcessSpec(name="far", actor="tests.actors.test_bonds:Friend", restart="temporary")
    ref = await node.spawn(spec)
    await observer.tell(Observe(ref=ref))
    return ref


@pytest.mark.parametrize("linker", ["near", "far"])
async def test_a_link_holds_across_processes(node: Node, linker: str) -> None:
    observer = await start(node, Observer(), "observer")
    near, far = await start(node, Friend(), "near"), await far_friend(node, observer)
    await observer.tell(Observe(ref=near))
    await observer.ask(Observed(count=0))
    one, other = (near, far) if linker == "near" else (far, near)
    await one.tell(Link(ref=other))
    await one.ask(Settled())
    await other.ask(Settled())
    end = life(near).ended
    os.kill(await far.ask(Settled()), signal.SIGKILL)
    reason = await end
    assert reason.first.signal == "SIGKILL"
    with pytest.raises(ActorDied):
        await far.ask(Settled())


async def test_a_crash_here_ends_a_linked_actor_elsewhere(node: Node) -> None:
    observer = await start(node, Observer(), "observer")
    near, far = await start(node, Friend(), "near"), await far_friend(node, observer)
    third = await start(node, Friend(), "third")
    for ref in (near, third):
        await observer.tell(Observe(ref=ref))
    await far.tell(Link(ref=near))
    await far.tell(Link(ref=third))
    await far.tell(Unlink(ref=third))
    await far.ask(Settled())
    await near.tell(Break())
    downs = await observer.ask(Observed(count=2))
    assert {down.ref for down in downs} == {near, far}
    assert {down.reason.first.message for down in downs} == {"it broke"}
    await third.ask(Settled())


async def cut(sim: Simulation) -> None:
    """Two machines that lose each other: each end of the link dies, whatever frames are on their way."""
    hosts = {name: sim.host(name) for name in ("one", "two")}
    up: asyncio.Future[tuple[Ref, str]] = sim.loop.create_future()
    reasons: dict[str, ExitReason] = {}

    async def machine(name: str) -> None:
        async with sim.node(name, hosts[name]) as node:
            observer = await start(node, Observer(), "observer")
            ref = await start(node, Friend(), name)
            await observer.tell(Observe(ref=ref))
            await observer.ask(Observed(count=0))
            if name == "one":
                up.set_result((ref, await node.listen()))
            else:
                other, endpoint = await up
                other = node.bind(other.node_id, endpoint, other.id, other.name, other.incarnation)
                await ref.tell(Link(ref=other))
            (down,) = await observer.ask(Observed(count=1), timeout_s=600.0)
            reasons[name] = down.reason

    tasks = [sim.start(hosts[name], machine(name)) for name in hosts]
    one, _ = await up
    await asyncio.sleep(sim.rng.random() * 0.05)
    known = life(one)._bonds is not None
    if known and sim.rng.random() < 0.5:
        sim.network.break_connections(hosts["one"])
    else:
        sim.network.partition(hosts["one"], hosts["two"])
    await asyncio.wait(tasks, timeout=300.0)
    # Where the cut came first, perhaps nobody has told `one` of the link.
    if not reasons.keys() >= ({"one", "two"} if known else {"two"}):
        sim.violate(f"only {[*reasons]} died")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    if any(reason.first.kind != "lost" for reason in reasons.values()):
        sim.violate(f"{reasons}")


def test_machines_that_lose_each_other_lose_both_ends_of_a_link() -> None:
    run_seeds(cut, range(40))
