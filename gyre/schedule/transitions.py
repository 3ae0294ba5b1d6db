"""What the WaterlevelActor has a cell and the proxy do: admission, role changes, updates."""

from __future__ import annotations

import asyncio

import structlog

from gyre.actors import ActorError, Ask, Ref
from gyre.cell.messages import (
    CellRole,
    EnterRollout,
    EnterTrain,
    RoleChanged,
    UpdateWeights,
)
from gyre.schedule.messages import CloseRoute, OpenRoute
from gyre.schedule.roster import CellLife

log = structlog.get_logger()


class CellError(Exception):
    """A cell could not do what it was asked."""

    def __init__(self, cell: int, message: str, reason: str) -> None:
        super().__init__(f"cell {cell}: {message}: {reason}")
        self.cell = cell
        self.message = message
        self.reason = reason


class Transitions:
    """Role changes and updates of cells. Raises CellError where the cell is at fault, in which case it is
    left as it is; an error of the proxy is passed on."""

    def __init__(self, proxy: Ref, timeout_s: float) -> None:
        self._proxy = proxy
        self._timeout_s = timeout_s

    async def admit(self, life: CellLife, published: int) -> None:
        """A new life gets calls when it has the published weights."""
        if life.up.role == "train":
            life.become("train")
            return
        if life.version < published:
            await self.update(life)
        await self._open_route(life)
        life.become("rollout")

    async def to_train(self, life: CellLife, waterlevel: str) -> int:
        """Answers how many calls in flight were moved."""
        began = self._now()
        life.become("changing")
        closed = await self._proxy.ask(CloseRoute(cell=life.cell), timeout_s=self._timeout_s)
        changed = await self._ask(life, EnterTrain())
        life.version = changed.version
        life.become("train")
        self._log(changed, closed.calls, waterlevel, began, {**closed.states_s, **changed.states_s})
        return closed.calls

    async def to_rollout(self, life: CellLife, waterlevel: str) -> None:
        began = self._now()
        life.become("changing")
        changed = await self._ask(life, EnterRollout())
        life.version = changed.version
        opening = self._now()
        await self._open_route(life)
        life.become("rollout")
        opened_s = self._now() - opening
        self._log(changed, 0, waterlevel, began, {**changed.states_s, "open_route": opened_s})

    async def update(self, life: CellLife) -> None:
        """The published weights, under live calls."""
        life.version = (await self._ask(life, UpdateWeights())).version

    async def update_all(self, lives: list[CellLife]) -> list[CellError | None]:
        """All at once; answers what went wrong, in order."""
        return await asyncio.gather(*(self._try_update(life) for life in lives))

    async def _try_update(self, life: CellLife) -> CellError | None:
        try:
            await self.update(life)
        except CellError as error:
            return error
        return None

    async def _open_route(self, life: CellLife) -> None:
        up = life.up
        route = OpenRoute(
            cell=up.cell,
            incarnation=up.incarnation,
            engines=up.engines,
            version=life.version,
            capacity_calls=up.capacity_calls,
            window_tokens=up.window_tokens,
        )
        await self._proxy.ask(route, timeout_s=self._timeout_s)
        if life.is_dead:
            # It died meanwhile, and its route may have been closed before it was opened.
            await self._proxy.ask(CloseRoute(cell=up.cell, lost=True), timeout_s=self._timeout_s)

    async def _ask(self, life: CellLife, message: Ask[RoleChanged]) -> RoleChanged:
        name = type(message).__name__
        if life.is_dead:
            raise CellError(life.cell, name, "it is dead")
        try:
            return await life.up.ref.ask(message, timeout_s=self._timeout_s)
        except ActorError as error:
            raise CellError(life.cell, name, str(error)) from error

    def _log(
        self, changed: RoleChanged, moved: int, waterlevel: str, began: float, states_s: dict[str, float]
    ) -> None:
        role: CellRole = changed.role
        log.info(
            "role_change",
            cell=changed.cell,
            role=role,
            version=changed.version,
            calls_in_flight=moved,
            waterlevel=waterlevel,
            seconds=round(self._now() - began, 4),
            states_s={name: round(seconds, 4) for name, seconds in states_s.items()},
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
