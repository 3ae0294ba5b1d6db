from __future__ import annotations

import asyncio

import pytest

from gyre.actors import Actor, ChildSpec, Node, Ref, SpawnFailed, WouldDeadlock, handles
from tests.actors.conftest import start
from tests.actors.zoo import Circle, Dancer, GoRound, GoRoundAside


async def circle(node: Node, names: str) -> list[Ref]:
    refs = [await start(node, Dancer(), name) for name in names]
    for ref, following in zip(refs, refs[1:] + refs[:1], strict=True):
        await ref.tell(Circle(next=following))
    return refs


@pytest.mark.parametrize(("names", "cycle"), [("a", "a#1 -> a#1"), ("ab", "a#1 -> b#1 -> a#1")])
async def test_a_cycle_of_asks_is_named_at_once(node: Node, names: str, cycle: str) -> None:
    refs = await circle(node, names)
    async with asyncio.timeout(2):
        with pytest.raises(WouldDeadlock) as caught:
            await refs[0].ask(GoRound())
    assert " -> ".join(caught.value.cycle) == cycle


async def test_a_cycle_further_in_is_named_without_those_before_it(node: Node) -> None:
    a, _ = await circle(node, "ab")
    outside = await start(node, Dancer(), "outside")
    await outside.tell(Circle(next=a))
    with pytest.raises(WouldDeadlock, match=r"^a#1 -> b#1 -> a#1$"):
        await outside.ask(GoRound())


async def test_a_concurrent_handler_is_no_part_of_a_cycle(node: Node) -> None:
    b = await start(node, Dancer(), "b")
    a = await start(node, Dancer(), "a")
    await a.tell(Circle(next=b))
    assert await a.ask(GoRoundAside()) == "alone"


async def test_the_same_actor_twice_in_a_row_is_no_cycle(node: Node) -> None:
    a, b = await circle(node, "ab")
    c = await start(node, Dancer(), "c")
    await b.tell(Circle(next=c))
    assert [await a.ask(GoRound()) for _ in range(3)] == ["alone"] * 3


class AsksParent(Actor):
    def __init__(self, parent: Ref) -> None:
        self.parent = parent

    async def started(self) -> None:
        await self.parent.ask(GoRound())


class SpawnsInHandler(Actor):
    @handles(GoRound)
    async def go_round(self, message: GoRound) -> str:
        parent = self.context.ref
        await self.context.spawn(ChildSpec(name="child", start=lambda: AsksParent(parent)))
        return "never"


async def test_a_child_that_asks_the_handler_that_starts_it_fails_to_start(node: Node) -> None:
    ref = await start(node, SpawnsInHandler(), "parent")
    async with asyncio.timeout(2):
        with pytest.raises(Exception, match="parent#1 -> child#1 -> parent#1"):
            await ref.ask(GoRound())


class AsksItselfAtStart(Actor):
    async def started(self) -> None:
        await self.context.ref.ask(GoRound())

    @handles(GoRound)
    async def go_round(self, message: GoRound) -> str:
        return "never"


async def test_an_actor_that_asks_itself_at_start_fails_to_start(node: Node) -> None:
    with pytest.raises(SpawnFailed, match="a#1 -> a#1"):
        await start(node, AsksItselfAtStart(), "a")
