from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.actors import ChildSpec, Node, NodeFailed, Supervision, run
from gyre.actors.life import Life
from tests.actors.conftest import start
from tests.actors.zoo import Add, Counter, Crash, Observe, Observed, Observer


async def test_a_top_level_crash_that_nobody_handles_fails_the_node() -> None:
    with pytest.raises(NodeFailed, match="ValueError: bang") as caught:
        async with Node(name="test") as node:
            ref = await start(node, Counter())
            await ref.tell(Crash(text="bang"))
            await asyncio.Event().wait()
    assert "in crash" in caught.value.reason.traceback


async def test_failed_raises_what_failed() -> None:
    with pytest.raises(NodeFailed, match="bang"):
        async with Node(name="test") as node:
            ref = await start(node, Counter())
            await ref.tell(Crash(text="bang"))
            await node.failed()


async def test_a_watched_temporary_crash_is_handled(node: Node) -> None:
    observer = await start(node, Observer(), "observer")
    ref = await start(node, Counter())
    await observer.tell(Observe(ref=ref))
    await observer.ask(Observed(count=0))
    await ref.tell(Crash())
    await observer.ask(Observed(count=1))
    await asyncio.sleep(0.01)
    assert await observer.ask(Observed(count=1))


async def test_a_permanent_top_level_actor_lives_again(node: Node) -> None:
    lives: asyncio.Queue[int] = asyncio.Queue()

    class Announced(Counter):
        async def started(self) -> None:
            lives.put_nowait(self.context.incarnation)

    ref = await node.spawn(ChildSpec(name="a", start=Announced))
    await ref.tell(Crash())
    assert [await lives.get(), await lives.get()] == [1, 2]
    await asyncio.sleep(0)
    again = node.lookup("a")
    assert again is not None
    assert await again.ask(Add(amount=1)) == 1


async def test_no_restarts_at_the_top_on_request() -> None:
    with pytest.raises(NodeFailed):
        async with Node(name="test", supervision=Supervision(max_restarts=0)) as node:
            ref = await node.spawn(ChildSpec(name="a", start=Counter))
            await ref.tell(Crash())
            await node.failed()


async def test_what_the_body_raises_goes_on() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Node(name="test") as node:
            await start(node, Counter())
            raise ZeroDivisionError


async def test_a_cancel_from_outside_stays_a_cancel() -> None:
    ready = asyncio.Event()
    counter = Counter()

    async def body() -> None:
        async with Node(name="test") as node:
            await start(node, counter)
            ready.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert counter.seen == ["stopping"]


async def test_leaving_stops_the_youngest_first() -> None:
    one, two = Counter(), Counter()
    order: list[Counter] = []

    class Ordered(Counter):
        async def stopping(self) -> None:
            order.append(self)

    one, two = Ordered(), Ordered()
    async with Node(name="test") as node:
        await start(node, one, "one")
        await start(node, two, "two")
    assert order == [two, one]


async def test_nothing_is_left_after_leaving() -> None:
    before = asyncio.all_tasks()
    async with Node(name="test") as node:
        for i in range(50):
            await start(node, Counter(), f"a{i}")
    assert asyncio.all_tasks() == before
    assert node.lives == {}


async def test_refs_are_equal_by_life(node: Node) -> None:
    ref = await start(node, Counter())
    same = node.bind(ref.node_id, "", ref.id, ref.name, ref.incarnation)
    assert same == ref
    assert hash(same) == hash(ref)
    assert isinstance(same.target, Life)
    assert ref != await start(node, Counter(), "b")


def test_run_uses_uvloop() -> None:
    async def main() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(main()) == "uvloop"


def test_import_is_light() -> None:
    heavy = ("torch", "numpy", "structlog", "uvloop", "rich")
    code = f"import sys, gyre.actors; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert out.stdout.strip() == "[]"
