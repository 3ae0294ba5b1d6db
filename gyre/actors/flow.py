"""How many messages one peer may have under way to each actor of another."""

from __future__ import annotations

import asyncio
from collections import deque

# Messages that may be on their way to one actor, or wait in its mailbox, from one peer.
CREDIT = 1024
TAKEN_AT_ONCE = 256


class _Flow:
    __slots__ = ("in_flight", "writers")

    def __init__(self) -> None:
        self.in_flight = 0
        self.writers: deque[asyncio.Future[None]] = deque()

    def wake(self, count: int) -> None:
        while self.writers and count > 0:
            writer = self.writers.popleft()
            if not writer.done():
                writer.set_result(None)
                count -= 1


class Flows:
    """By actor, what was sent to it and has not left its mailbox, as far as is known here. Nothing is kept
    of an actor of whom all is known to be taken."""

    def __init__(self) -> None:
        self._flows: dict[int, _Flow] = {}

    def __len__(self) -> int:
        return len(self._flows)

    def sent(self, actor_id: int) -> None:
        flow = self._flows.get(actor_id) or self._of(actor_id)
        flow.in_flight += 1

    def taken(self, actor_id: int, count: int) -> None:
        flow = self._flows.get(actor_id)
        if flow is None:
            return
        flow.in_flight -= count
        flow.wake(count)
        if flow.in_flight <= 0 and not flow.writers:
            del self._flows[actor_id]

    def has_room(self, actor_id: int) -> bool:
        flow = self._flows.get(actor_id)
        return flow is None or flow.in_flight < CREDIT

    async def room(self, actor_id: int) -> None:
        """Until there was room for a moment, or no more is wanted: look again."""
        flow = self._of(actor_id)
        writer = asyncio.get_running_loop().create_future()
        flow.writers.append(writer)
        try:
            await writer
        except asyncio.CancelledError:
            if writer.done() and not writer.cancelled():
                flow.wake(1)
            raise

    def close(self) -> None:
        """All writers look again."""
        for flow in self._flows.values():
            flow.wake(len(flow.writers))
        self._flows.clear()

    def _of(self, actor_id: int) -> _Flow:
        flow = self._flows.get(actor_id)
        if flow is None:
            flow = self._flows[actor_id] = _Flow()
        return flow
