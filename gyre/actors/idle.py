"""Ends the main tasks of actors that have nothing to do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre.actors.handling import Handling

SWEEP_S = 1.0


class Idle:
    """The lives that have a main task. One that rests over a whole sweep dozes: what a message costs does not
    depend on it. No timer while there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._awake: dict[Handling, asyncio.Future[Any] | None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, life: Handling) -> None:
        """Its main task has begun."""
        self._awake[life] = None
        if self._timer is None:
            self._timer = self._loop.call_later(SWEEP_S, self._sweep)

    def forget(self, life: Handling) -> None:
        self._awake.pop(life, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _sweep(self) -> None:
        for life, before in [*self._awake.items()]:
            resting = life.resting()
            if resting is not None and resting is before:
                life.doze()
                del self._awake[life]
            else:
                self._awake[life] = resting
        self._timer = self._loop.call_later(SWEEP_S, self._sweep) if self._awake else None
