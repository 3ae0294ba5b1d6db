from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gyre.actors import Ref
from gyre.harness.places import Places


def machine(name: str) -> Ref:
    target: Any = None  # nobody is spoken to
    return Ref(name, "tcp:127.0.0.1:1", 1, name, 1, target)


async def test_other_machines_come_first_and_share_by_their_room() -> None:
    small, large = machine("small"), machine("large")
    places = Places(here=1)
    places.add(small, 1)
    places.add(large, 3)
    assert places.total == 5
    async with AsyncExitStack() as stack:
        went = [await stack.enter_async_context(places.place()) for _ in range(5)]
    assert sorted(went[:2], key=str) == sorted([small, large], key=str)
    assert went[2:] == [large, large, None]


async def test_who_finds_no_place_waits_for_one() -> None:
    places = Places(here=0)
    began: asyncio.Queue[Ref | None] = asyncio.Queue()
    end = asyncio.Semaphore(0)

    async def play() -> None:
        async with places.place() as where:
            began.put_nowait(where)
            await end.acquire()

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(play())
        await asyncio.sleep(0)
        assert began.empty()
        places.add(machine("a"), 1)
        first = await began.get()
        await asyncio.sleep(0)
        assert began.empty()
        end.release()
        assert await began.get() == first == machine("a")
        end.release()


async def test_a_machine_that_is_gone_has_no_places() -> None:
    gone = machine("gone")
    places = Places(here=1)
    places.add(gone, 4)
    async with places.place() as where:
        assert where == gone
        assert places.remove(gone)
        assert not places.remove(gone)
        assert places.total == 1
        async with places.place() as other:
            assert other is None


@given(st.integers(1, 3), st.lists(st.integers(1, 4), max_size=3), st.lists(st.integers(0, 5), max_size=40))
def test_nowhere_are_more_than_there_is_room(here: int, rooms: list[int], lengths: list[int]) -> None:
    async def run() -> None:
        places = Places(here)
        machines = {machine(f"m{index}"): room for index, room in enumerate(rooms)}
        for ref, room in machines.items():
            places.add(ref, room)
        room = {None: here, **machines}
        taken = dict.fromkeys(room, 0)

        async def play(turns: int) -> None:
            async with places.place() as where:
                taken[where] += 1
                assert taken[where] <= room[where]
                for _ in range(turns):
                    await asyncio.sleep(0)
                taken[where] -= 1

        async with asyncio.TaskGroup() as group:
            for turns in lengths:
                group.create_task(play(turns))

    asyncio.run(run())
