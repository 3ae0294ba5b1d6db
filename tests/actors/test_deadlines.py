from __future__ import annotations

import asyncio

from gyre.actors.deadlines import Deadlines, Expiring
from tests.actors.conftest import until


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
    await until(lambda: "late" in log)
    assert log == ["early", "late"]
    deadlines.close()


async def test_of_one_tick_the_latest_added_expires_first() -> None:
    loop = asyncio.get_running_loop()
    deadlines, log = Deadlines(loop), []  # type: ignore[var-annotated]
    at = loop.time() + 0.01
    for name in ("outer", "inner", "innermost"):
        deadlines.add(Item(name, log), at)
    await until(lambda: "outer" in log)
    assert log == ["innermost", "inner", "outer"]


async def test_what_was_discarded_does_not_expire() -> None:
    loop = asyncio.get_running_loop()
    deadlines, log = Deadlines(loop), []  # type: ignore[var-annotated]
    item = Item("gone", log)
    deadlines.add(item, loop.time() + 0.01)
    deadlines.discard(item)
    deadlines.discard(item)
    deadlines.add(Item("later", log), loop.time() + 0.03)
    await until(lambda: bool(log))
    assert log == ["later"]


async def test_a_deadline_in_the_past_expires_on_the_next_turn() -> None:
    loop = asyncio.get_running_loop()
    deadlines, log = Deadlines(loop), []  # type: ignore[var-annotated]
    began_s = loop.time()
    deadlines.add(Item("past", log), began_s - 5)
    await until(lambda: bool(log))
    assert log == ["past"]
    assert loop.time() - began_s < 5
