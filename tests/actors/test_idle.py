"""An idle actor has no task: what comes at the very moment its task ends is handled all the same."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from gyre.actors import Actor, Ask, Node, Ref, handles
from tests.actors.conftest import life, start
from tests.actors.zoo import Add, Bump, Counter, Observer, Quit


class Kept:
    """Can be seen to be gone."""


async def dead(node: Node, name: str) -> Ref:
    """Who monitors it gets a Down at once."""
    ref = await start(node, Counter(), name)
    await node.stop(ref)
    return ref


async def dozing(node: Node, actor: Counter | Observer) -> None:
    """Its main task was told that nothing has come, and has not run since."""
    ref = await start(node, actor)
    if isinstance(actor, Counter):
        await ref.tell(Bump(amount=0))
    else:
        life(ref).monitor(await dead(node, "first"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert life(ref).resting() is not None
    life(ref).doze()


async def test_an_ask_that_comes_as_its_actor_dozes_off_is_answered(node: Node) -> None:
    counter = Counter()
    await dozing(node, counter)
    assert await counter.context.ref.ask(Add(amount=2), timeout_s=20.0) == 2


async def test_a_tell_that_comes_as_its_actor_dozes_off_is_handled(node: Node) -> None:
    counter = Counter()
    await dozing(node, counter)
    await counter.context.ref.tell(Bump(amount=3))
    assert await counter.context.ref.ask(Add(amount=0), timeout_s=20.0) == 3


async def test_a_down_that_comes_as_its_actor_dozes_off_is_handled(node: Node) -> None:
    observer, second = Observer(), await dead(node, "second")
    await dozing(node, observer)
    life(observer.context.ref).monitor(second)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(observer.downs) == 2


async def test_a_stop_that_comes_as_its_actor_dozes_off_ends_it(node: Node) -> None:
    counter = Counter()
    await dozing(node, counter)
    async with asyncio.timeout(20):
        await counter.context.ref.tell(Quit())
        assert (await life(counter.context.ref).ended).kind == "normal"


async def test_one_that_was_woken_as_it_dozed_off_dozes_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.actors.idle.SWEEP_S", 0.01)
    counter = Counter()
    await dozing(node, counter)
    ref = counter.context.ref
    await ref.tell(Bump())
    main = life(ref)._main
    assert main is not None
    async with asyncio.timeout(20):
        await asyncio.wait([main])
    assert life(ref)._main is None
    assert counter.total == 1


class Keep(Ask[Kept], frozen=True, kw_only=True):
    pass


class Giver(Actor):
    @handles(Keep)
    async def keep(self, message: Keep) -> Kept:
        return Kept()


async def test_an_idle_actor_keeps_neither_its_last_message_nor_what_it_answered(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.actors.idle.SWEEP_S", 0.01)
    ref = await start(node, Giver())
    answered = weakref.ref(await ref.ask(Keep()))
    main = life(ref)._main
    assert main is not None
    async with asyncio.timeout(20):
        await asyncio.wait([main])
    gc.collect()
    assert answered() is None
