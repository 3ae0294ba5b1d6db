from __future__ import annotations

import asyncio

from gyre.actors.deadlines import Deadlines, Expiring


class Item:
    def __init__(self, name: str, log: list[str]) -> None:
        self.slot: dict[Expiring, None] | None = None
        self.name = name
        self.log = log

    def expire(self) -> None:
        self.log.append(self.name)


async def test_what_is_due_expires_in_the_order_of_deadlines() -> None:
    loop = asyncio.get_running_loop()
    deadlines, log = Deadlines(loop), []  # type: ignore[var-annotated]
    now = loop.time()
    for name, after_s in (("late", 0.03), ("early", 0.01), ("never", 60)):
        deadlines.add(Item(name, log), now + after_s)
    await asyncio.sleep(0.05)
    assert log == ["early", "late"]
    deadlines.close()


async def test_of_one_tick_the_latest_added_expires_first() -> None:
    loop = asyncio.get_running_loop()
    deadlines, log = Deadlines(loop), []  # type: ignore[var-annotated]
    at = loop.time() + 0.01
    for name in ("outer", "inner", "innermost"):
        deadlines.add(Item(name, log), at)
    await asyncio.sleep(0.03)
    assert log == ["innermost", "inner", "outer"]


async def test_what_was_discarded_does_not_expire() -> None:
    loop = asyncio.get_running_loop()
    deadlines, log = Deadlines(loop), []  # type: ignore[var-annotated]
    item = Item("gone", log)
    deadlines.add(item, loop.time() + 0.01)
    deadlines.discard(item)
    deadlines.discard(item)
    await asyncio.sleep(0.03)
    assert log == []


async def test_a_deadline_in_the_past_expires_on_the_next_turn() -> None:
    loop = asyncio.get_running_loop()
    deadlines, log = Deadlines(loop), []  # type: ignore[var-annotated]
    deadlines.add(Item("past", log), loop.time() - 5)
    await asyncio.sleep(0.02)
    assert log == ["past"]
