"""Which cells there are: their lives as the WaterlevelActor sees them, and what they say of themselves."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from gyre.actors import ActorError, Ref
from gyre.cell.messages import CellRole, CellStatus, CellUp, GetStatus
from gyre.schedule.policy import CORE
from gyre.schedule.state import CellPhase, CellState

Standing = Literal["new", "rollout", "train", "changing", "dead"]


class CellLife:
    """One life of a cell: new until its route is open, dead for ever once anything failed."""

    def __init__(self, up: CellUp) -> None:
        self.up = up
        self.version = up.version
        self.standing: Standing = "new"
        self.to: CellRole | None = None

    @property
    def cell(self) -> int:
        return self.up.cell

    @property
    def is_dead(self) -> bool:
        return self.standing == "dead"

    def become(self, standing: Standing) -> None:
        """Whatever is in progress, the dead stay dead."""
        if not self.is_dead:
            self.standing = standing

    def change(self, to: CellRole) -> None:
        """It is about to change its role."""
        self.to = to
        self.become("changing")

    def state(self) -> CellState:
        standing = self.standing
        phase: CellPhase = "down" if standing == "new" or standing == "dead" else standing
        return CellState(
            cell=self.cell,
            phase=phase,
            capacity=self.up.capacity_calls,
            version=self.version,
            to=self.to if phase == "changing" else None,
        )


class Roster:
    """The newest life of each cell by its number; `cells` of them are expected, more may join."""

    def __init__(self, cells: int) -> None:
        self._expected = cells
        self._lives: dict[int, CellLife] = {}
        self._statuses: dict[int, CellStatus] = {}

    def add(self, up: CellUp) -> CellLife | None:
        """Answers the life before."""
        before = self._lives.get(up.cell)
        self._lives[up.cell] = CellLife(up)
        return before

    def __getitem__(self, cell: int) -> CellLife:
        return self._lives[cell]

    def find(self, cell: int, incarnation: int) -> CellLife | None:
        life = self._lives.get(cell)
        return life if life is not None and life.up.incarnation == incarnation else None

    def of(self, ref: Ref) -> CellLife | None:
        return next((life for life in self._lives.values() if life.up.ref == ref), None)

    def standing(self, standing: Standing) -> list[CellLife]:
        return [life for life in self._lives.values() if life.standing == standing]

    @property
    def core(self) -> Ref | None:
        """None while no core lives."""
        life = self._lives.get(CORE)
        return None if life is None or life.is_dead else life.up.ref

    def states(self) -> list[CellState]:
        """Of every cell in order; one that never was up is down."""
        count = max([self._expected, *(cell + 1 for cell in self._lives)])
        return [
            self._lives[cell].state()
            if cell in self._lives
            else CellState(cell=cell, phase="down", capacity=0, version=0)
            for cell in range(count)
        ]

    async def statuses(self, timeout_s: float) -> tuple[CellStatus, ...]:
        """Of every cell that ever answered. One that is dead, or too busy to answer, is shown as it was."""
        await asyncio.gather(*(self._look_at(life, timeout_s) for life in self._lives.values()))
        return tuple(self._statuses[cell] for cell in sorted(self._statuses))

    async def _look_at(self, life: CellLife, timeout_s: float) -> None:
        try:
            self._statuses[life.cell] = await life.up.ref.ask(GetStatus(), timeout_s=timeout_s)
        except ActorError:
            seen = self._statuses.get(life.cell)
            if seen is not None:
                self._statuses[life.cell] = msgspec.structs.replace(seen, changing=True)
