from __future__ import annotations

import asyncio
import re

import pytest

from gyre.actors import Actor, Ask, ChildSpec, Node, Ref, SpawnFailed, WouldDeadlock, handles
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


class Meet(Ask[str], frozen=True, kw_only=True):
    """Asks `others` when as many are being handled as the barrier is for, one after another or at once."""

    others: tuple[Ref, ...]
    at_once: bool = False


class Guest(Actor):
    def __init__(self, barrier: asyncio.Barrier) -> None:
        self.barrier = barrier

    @handles(Meet)
    async def meet(self, message: Meet) -> str:
        await self.barrier.wait()
        return await self.ask(message)

    @handles(GoRound)
    async def go_round(self, message: GoRound) -> str:
        return self.context.name

    @handles(GoRoundAside, concurrent=True)
    async def aside(self, message: GoRoundAside) -> str:
        return "aside"

    async def ask(self, message: Meet) -> str:
        if message.at_once:
            return "".join(await asyncio.gather(*(ref.ask(GoRound()) for ref in message.others)))
        return "".join([await ref.ask(GoRound()) for ref in message.others])


async def guests(node: Node, names: str, party: int | None = None) -> dict[str, Ref]:
    barrier = asyncio.Barrier(party or len(names))
    return {name: await start(node, Guest(barrier), name, mailbox=1) for name in names}


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
async def test_independent_chains_that_wait_for_each_other_are_a_cycle(node: Node, names: str) -> None:
    """Exactly one of them is told, the others are answered; mailboxes of one message change nothing."""
    refs = await guests(node, names)
    around = names[1:] + names[:1]
    async with asyncio.timeout(2):
        answers = await asyncio.gather(
            *(refs[a].ask(Meet(others=(refs[b],))) for a, b in zip(names, around, strict=True)),
            return_exceptions=True,
        )
    (error,) = [answer for answer in answers if isinstance(answer, WouldDeadlock)]
    answered = [name for name, answer in zip(around, answers, strict=True) if answer is not error]
    assert [answer for answer in answers if answer is not error] == answered
    assert len(error.cycle) == len(names) + 1
    assert error.cycle[0] == error.cycle[-1]
    assert {label.removesuffix("#1") for label in error.cycle} == set(names)
    assert len(node.waits) == 0


async def test_of_asks_at_once_any_may_close_the_cycle(node: Node) -> None:
    refs = await guests(node, "abc", party=2)
    async with asyncio.timeout(2):
        answers = await asyncio.gather(
            refs["a"].ask(Meet(others=(refs["c"], refs["b"]), at_once=True)),
            refs["b"].ask(Meet(others=(refs["c"], refs["a"]))),
            return_exceptions=True,
        )
    assert sum(isinstance(answer, WouldDeadlock) for answer in answers) == 1
    assert len(node.waits) == 0


async def test_a_concurrent_handler_between_two_chains_is_passed_through(node: Node) -> None:
    """`a` waits for an aside of `between`, which asks `b`; `b` asks `a`."""
    between = await start(node, Dancer(), "between")
    barrier = asyncio.Barrier(2)
    b = await start(node, Guest(barrier), "b")
    await between.tell(Circle(next=b))

    class A(Guest):
        async def ask(self, message: Meet) -> str:
            return await between.ask(GoRoundAside())

    a = await start(node, A(barrier), "a")
    async with asyncio.timeout(2):
        answers = await asyncio.gather(
            a.ask(Meet(others=())), b.ask(Meet(others=(a,))), return_exceptions=True
        )
    assert sum(isinstance(answer, WouldDeadlock) for answer in answers) == 1


async def test_one_that_waits_for_a_third_that_is_free_is_no_cycle(node: Node) -> None:
    """`b` asks `a`, which waits for `c`, which is only busy."""
    refs = await guests(node, "abc", party=3)
    async with asyncio.timeout(2):
        answers = await asyncio.gather(
            refs["a"].ask(Meet(others=(refs["c"],))),
            refs["b"].ask(Meet(others=(refs["a"],))),
            refs["c"].ask(Meet(others=())),
        )
    assert answers == ["c", "a", ""]


async def test_concurrent_handlers_may_be_asked_crosswise(node: Node) -> None:
    class Asks(Guest):
        async def ask(self, message: Meet) -> str:
            return await message.others[0].ask(GoRoundAside())

    barrier = asyncio.Barrier(2)
    a, b = await start(node, Asks(barrier), "a"), await start(node, Asks(barrier), "b")
    async with asyncio.timeout(2):
        answers = await asyncio.gather(a.ask(Meet(others=(b,))), b.ask(Meet(others=(a,))))
    assert answers == ["aside", "aside"]


async def test_who_starts_a_child_waits_for_whom_that_asks(node: Node) -> None:
    barrier = asyncio.Barrier(2)
    b = await start(node, Guest(barrier), "b")

    class StartsChild(Guest):
        async def ask(self, message: Meet) -> str:
            await self.context.spawn(ChildSpec(name="child", start=lambda: AsksParent(b)))
            return "spawned"

    a = await start(node, StartsChild(barrier), "a")
    async with asyncio.timeout(2):
        answers = await asyncio.gather(
            a.ask(Meet(others=())), b.ask(Meet(others=(a,))), return_exceptions=True
        )
    told = [str(answer) for answer in answers if "child#1" in str(answer)]
    assert told and {"a#1", "b#1", "child#1"} == {*re.findall(r"\w+#1", told[0])}
    assert len(node.waits) == 0
