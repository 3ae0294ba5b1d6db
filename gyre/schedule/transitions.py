"""What the WaterlevelActor has a cell and the proxy do: admission, role changes, updates."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial

import structlog

from gyre.actors import ActorError, Ask, Ref
from gyre.cell.messages import (
    CellRole,
    EnterRollout,
    EnterTrain,
    RoleChanged,
    RoleOutcome,
    RoleState,
    TurnBack,
    UpdateWeights,
)
from gyre.cell.states import StateTimes, log_state
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


class Change:
    """A role change of one cell, on the order of `waterlevel`."""

    def __init__(self, number: int, life: CellLife, waterlevel: str) -> None:
        self.id = f"r{number:06d}"
        self.life = life
        self.waterlevel = waterlevel
        self.unwanted: str | None = None
        self.began_s = time.monotonic()
        self.calls = 0
        self.states_s: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s


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

    async def to_train(self, change: Change) -> RoleOutcome:
        """The cell is in train role then, or back in rollout role with its route open."""
        life = change.life
        self._begin(change, "train")
        close = CloseRoute(cell=life.cell, change=change.id)
        closed = await self._proxy.ask(close, timeout_s=self._timeout_s)
        change.calls = closed.calls
        change.states_s |= closed.states_s
        if change.unwanted is not None:
            changed = RoleChanged(
                cell=life.cell,
                role="rollout",
                version=life.version,
                seconds=0.0,
                states_s={},
                outcome="turned_back",
                cause=change.unwanted,
            )
        else:
            changed = await self._ask(life, EnterTrain(change=change.id))
        return await self._settle(change, changed)

    async def to_rollout(self, change: Change) -> RoleOutcome:
        """The cell is in rollout role then and its route open, or back in train role."""
        self._begin(change, "rollout")
        changed = await self._ask(change.life, EnterRollout(change=change.id))
        return await self._settle(change, changed)

    async def turn_back(self, change: Change, cause: str) -> None:
        """The change is no longer wanted: from its next state on it is undone."""
        change.unwanted = cause
        log.info("role_change_unwanted", change=change.id, cell=change.life.cell, cause=cause)
        with suppress(ActorError):  # the order itself says so
            await change.life.up.ref.tell(TurnBack(change=change.id, cause=cause))

    def passed(self, state: RoleState) -> None:
        """A state of a change is over, at its cell."""
        log_state(state.change, state.cell, state.state, state.seconds, state.cause)

    def lost(self, change: Change, reason: str) -> None:
        """Its cell is."""
        log.warning("role_change_lost", change=change.id, cell=change.life.cell, reason=reason)

    def _begin(self, change: Change, to: CellRole) -> None:
        cell = change.life.cell
        log.info("role_change_ordered", change=change.id, cell=cell, to=to, waterlevel=change.waterlevel)
        change.life.change(to)

    async def _settle(self, change: Change, changed: RoleChanged) -> RoleOutcome:
        life = change.life
        life.version = changed.version
        change.states_s |= changed.states_s
        if changed.role == "rollout":
            opening = StateTimes(partial(log_state, change.id, life.cell))
            with opening.measure("open_route"):
                await self._open_route(life, change.id)
            change.states_s |= opening.by_state_s
        life.become(changed.role)
        self._log(change, changed)
        return changed.outcome

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

    async def _open_route(self, life: CellLife, change: str = "") -> None:
        up = life.up
        route = OpenRoute(
            cell=up.cell,
            incarnation=up.incarnation,
            engines=up.engines,
            version=life.version,
            capacity_calls=up.capacity_calls,
            window_tokens=up.window_tokens,
            change=change,
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

    def _log(self, change: Change, changed: RoleChanged) -> None:
        level = logging.WARNING if changed.outcome == "failed" else logging.INFO
        log.log(
            level,
            "role_change",
            change=change.id,
            cell=changed.cell,
            role=changed.role,
            outcome=changed.outcome,
            **({"cause": changed.cause} if changed.cause else {}),
            version=changed.version,
            calls_in_flight=change.calls,
            waterlevel=change.waterlevel,
            seconds=round(change.seconds, 4),
            states_s={name: round(seconds, 4) for name, seconds in change.states_s.items()},
        )
