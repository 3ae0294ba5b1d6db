from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

import pytest

from gyre.actors import Actor, ActorDied, Node, RemoteError, handles
from gyre.actors.streams import WINDOW_ITEMS
from tests.actors.conftest import life, start
from tests.actors.zoo import Add, Count, Counter, Crash


class Silent(Actor):
    @handles(Count)
    async def count(self, message: Count) -> AsyncIterator[int]:
        await asyncio.Event().wait()
        yield 1


async def test_items_come_in_order(node: Node) -> None:
    ref = await start(node, Counter())
    assert [item async for item in ref.stream(Count(upto=500))] == [*range(500)]


async def test_the_producer_runs_a_window_ahead_at_most(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    async with contextlib.aclosing(ref.stream(Count(upto=1000))) as items:
        assert await anext(items) == 0
        await asyncio.sleep(0.01)
        assert counter.produced <= WINDOW_ITEMS + 2


async def test_closing_cancels_the_handler(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    items = ref.stream(Count(upto=1000))
    await anext(items)
    await items.aclose()
    await counter.hanging.wait()
    assert counter.seen == ["count closed"]
    with pytest.raises(StopAsyncIteration):
        await anext(items)


async def test_a_dropped_stream_closes_itself(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    async for _ in ref.stream(Count(upto=1000)):
        break
    gc.collect()
    await counter.hanging.wait()
    assert counter.seen == ["count closed"]


async def test_cancelling_the_consumer_cancels_the_handler(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)

    async def consume() -> None:
        async for _ in ref.stream(Count(upto=10**9)):
            await asyncio.sleep(0)

    task = asyncio.create_task(consume())
    await counter.producing.wait()
    task.cancel()
    await counter.hanging.wait()


async def test_what_the_handler_raises_comes_after_its_items(node: Node) -> None:
    ref = await start(node, Counter())
    got = []
    with pytest.raises(RemoteError, match="ValueError: at 3"):
        async for item in ref.stream(Count(upto=10, fail_at=3)):
            got.append(item)
    assert got == [0, 1, 2]
    assert await ref.ask(Add(amount=1)) == 1


async def test_the_actors_death_ends_its_streams(node: Node) -> None:
    ref = await start(node, Counter())
    items = ref.stream(Count(upto=1000))
    await anext(items)
    life(ref).kill()
    with pytest.raises(ActorDied):
        async for _ in items:
            pass


async def test_a_stream_of_the_dead_raises(node: Node) -> None:
    ref = await start(node, Counter())
    await node.stop(ref)
    with pytest.raises(ActorDied):
        await anext(ref.stream(Count(upto=1)))


async def test_a_crash_in_another_handler_ends_streams_with_the_reason(node: Node) -> None:
    from gyre.actors import Supervision
    from tests.actors.zoo import Observe, Observer

    assert Supervision().max_restarts == 3
    observer = await start(node, Observer(), "observer")
    ref = await start(node, Counter())
    await observer.tell(Observe(ref=ref))
    items = ref.stream(Count(upto=1000))
    await anext(items)
    await ref.tell(Crash(text="bang"))
    with pytest.raises(ActorDied, match="bang"):
        async for _ in items:
            pass


async def test_who_waits_for_an_item_of_a_stream_that_another_closes_learns_it(node: Node) -> None:
    ref = await start(node, Silent())
    items = ref.stream(Count(upto=1))
    waiting = asyncio.ensure_future(anext(items, None))
    for _ in range(5):
        await asyncio.sleep(0)
    await items.aclose()
    async with asyncio.timeout(20):
        assert await waiting is None
