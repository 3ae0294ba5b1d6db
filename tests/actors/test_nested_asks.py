"""What an ask has in common with those that its handler makes, and what not."""

from __future__ import annotations

import asyncio

import pytest

from gyre.actors import Actor, Ask, ChildSpec, Node, Ref, RemoteError, handles
from gyre.actors.testing import Simulation
from tests.actors.conftest import life, start
from tests.actors.zoo import Add, Counter, Hang


class Nested(Ask[None], frozen=True, kw_only=True):
    pass


class Outer(Actor):
    def __init__(self, inner: Actor) -> None:
        self.inner = inner

    async def started(self) -> None:
        self.ref = await self.context.spawn(ChildSpec(name="inner", start=lambda: self.inner))

    @handles(Nested)
    async def nested(self, message: Nested) -> None:
        await self.ref.ask(Hang())


def test_the_deadline_of_an_ask_holds_for_what_its_handler_asks() -> None:
    """On a clock of its own: the inner one ends 20 ms before the outer one, which a busy machine may sleep
    through."""
    inner = Counter()

    async def scenario(sim: Simulation) -> RemoteError:
        async with sim.node("test", sim.host("test")) as node:
            ref = await start(node, Outer(inner))
            with pytest.raises(RemoteError) as caught:
                await ref.ask(Nested(), timeout_s=0.1)
            return caught.value

    error = Simulation(seed=1).run(scenario)
    assert error.type_name == "gyre.actors.errors:AskTimeout"
    assert "inner#1 did not answer Hang" in error.message
    assert inner.seen[0] == "hang ended"


async def test_cancelling_reaches_through_nested_asks(node: Node) -> None:
    inner = Counter()
    ref = await start(node, Outer(inner))
    asked = asyncio.create_task(ref.ask(Nested()))
    await inner.hanging.wait()
    asked.cancel()
    await asyncio.wait([asked])
    await life(ref).family.lookup("inner").ask(Add(amount=1))  # type: ignore[union-attr]
    assert inner.seen == ["hang ended"]


class Lasting(Ask[None], frozen=True, kw_only=True):
    pass


class OutlivesItsHandler(Actor):
    """Starts something in a handler that goes on after it, in that handler's context."""

    def __init__(self, inner: Ref) -> None:
        self.inner = inner
        self.later: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.go = asyncio.Event()

    @handles(Lasting)
    async def lasting(self, message: Lasting) -> None:
        self.task = asyncio.create_task(self._later())

    async def _later(self) -> None:
        await self.go.wait()
        self.later.set_result(await self.inner.ask(Add(amount=1)))


def test_what_outlives_a_handler_is_not_bound_by_its_deadline() -> None:
    async def scenario(sim: Simulation) -> int:
        async with sim.node("test", sim.host("test")) as node:
            actor = OutlivesItsHandler(await start(node, Counter(), "inner"))
            ref = await start(node, actor)
            await ref.ask(Lasting(), timeout_s=0.02)
            await asyncio.sleep(0.03)
            actor.go.set()
            return await actor.later

    assert Simulation(seed=1).run(scenario) == 1
