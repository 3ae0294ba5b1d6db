"""All deadlines of a node in one place."""

from __future__ import annotations

import asyncio
import heapq
from math import inf
from typing import Protocol

TICKS_PER_S = 250


class Expiring(Protocol):
    """Something with a deadline; `slot` is the table's own."""

    slot: dict[Expiring, None] | None

    def expire(self) -> None: ...


class Deadlines:
    """A heap of ticks, each with the set of what expires in it: adding and discarding are constant time and
    nothing is left behind by what was discarded, so 10^5 asks a second with a 30 s deadline each cost no
    memory. One timer of the loop, for the earliest tick."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ticks: list[int] = []
        self._slots: dict[int, dict[Expiring, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_tick = 0

    def add(self, item: Expiring, deadline: float) -> None:
        """`deadline` in seconds of the loop's clock, met within one tick (4 ms); infinity is none."""
        if deadline == inf:
            return
        tick = int(deadline * TICKS_PER_S) + 1
        slot = self._slots.get(tick)
        if slot is None:
            slot = self._slots[tick] = {}
            heapq.heappush(self._ticks, tick)
            if self._timer is None or tick < self._timer_tick:
                self._arm(tick)
        slot[item] = None
        item.slot = slot

    def discard(self, item: Expiring) -> None:
        slot = item.slot
        if slot is not None:
            item.slot = None
            slot.pop(item, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, tick: int) -> None:
        self.close()
        self._timer_tick = tick
        self._timer = self._loop.call_at(tick / TICKS_PER_S, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = int(self._loop.time() * TICKS_PER_S + 1e-6)
        while self._ticks and self._ticks[0] <= now:
            slot = self._slots.pop(heapq.heappop(self._ticks))
            # The latest first: an ask made inside another must be the one that is named.
            while slot:
                item, _ = slot.popitem()
                item.slot = None
                item.expire()
        while self._ticks and not self._slots[self._ticks[0]]:
            del self._slots[heapq.heappop(self._ticks)]
        if self._ticks:
            self._arm(self._ticks[0])
