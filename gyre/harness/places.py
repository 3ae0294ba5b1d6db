"""How many attempts are played at a time, and where: on this machine, and on others that joined for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gyre.actors import Ref

Where = Ref | None


class Places:
    """`here` are those of this machine; another machine is the Ref of its FarHarness. Others come first:
    here is where the proxy and cells are."""

    def __init__(self, here: int) -> None:
        self._room: dict[Where, int] = {None: here}
        self._taken: dict[Where, int] = {None: 0}
        self._changed = asyncio.Event()

    @property
    def total(self) -> int:
        return sum(self._room.values())

    def add(self, machine: Ref, places: int) -> None:
        self._room[machine] = places
        self._taken[machine] = 0
        self._changed.set()

    def remove(self, machine: Ref) -> bool:
        """Whether it was there. What is played there counts no more."""
        self._taken.pop(machine, None)
        return self._room.pop(machine, None) is not None

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Where]:
        """Waits for one that is free."""
        while (where := self._free()) is _NOWHERE:
            self._changed.clear()
            await self._changed.wait()
        assert not isinstance(where, _Nowhere)
        self._taken[where] += 1
        try:
            yield where
        finally:
            if where in self._taken:
                self._taken[where] -= 1
            self._changed.set()

    def _free(self) -> Where | _Nowhere:
        """The least busy of the other machines, or this one."""
        free = [where for where, room in self._room.items() if self._taken[where] < room]
        if not free:
            return _NOWHERE
        return min(free, key=lambda where: (where is None, self._taken[where] / self._room[where]))


class _Nowhere:
    pass


_NOWHERE = _Nowhere()
