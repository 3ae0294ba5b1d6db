"""A role change of a cell, one explicit list of states per direction.

rollout -> train: first the states at the proxy (`Routes.close`), then TO_TRAIN.
train -> rollout: TO_ROLLOUT, then `open_route` at the proxy. Ranks that are one engine meet as such in
`build_engine`, in place of `drop_group`. In rollout role ranks need no process group, and none stands: gloo
polls a hundred times a second as long as one does.

Each state is timed and told. Before each state a change that is no longer wanted turns back. On the way to
train a state of TURN_BACK that fails turns the change back too; on the way to rollout the states of
TRIED_TWICE are. Whatever else fails, the way back included, fails the change, and the cell with it: its
supervisor starts it again in a known state, its claims return. docs/role_changes.md says what each costs.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Protocol

import msgspec

from gyre.actors import RemoteError
from gyre.cell.messages import CellRole, RoleChanged, RoleOutcome, RoleState, Snapshot, SnapshotKind
from gyre.cell.ranks import AskRanks
from gyre.cell.states import StateTimes
from gyre.cell.worker_messages import (
    BeginTraining,
    BuildGroup,
    DropGroup,
    EndTraining,
    SleepEngine,
    UpdateEngine,
    WakeEngine,
)

GroupAddress = Callable[[], Awaitable[BuildGroup]]
Pull = Callable[[SnapshotKind], Awaitable[Snapshot]]
Release = Callable[[Snapshot], Awaitable[None]]
TellState = Callable[[RoleState], Awaitable[None]]

TO_TRAIN = ("sleep_engines", "build_group", "pull_training_weights", "begin_training")
TURN_BACK = frozenset(TO_TRAIN[1:])
LEAVE_TRAINING = ("finish_micro_step", "hand_over_contribution")
WAKE = ("drop_group", "pull_published_weights", "wake_engines")
TO_ROLLOUT = (*LEAVE_TRAINING, "end_training", *WAKE)
TRIED_TWICE = frozenset({"build_engine", "pull_published_weights", "wake_engines", "update_engines"})


class Training(Protocol):
    """The training loop of a cell in train role."""

    async def finish(self) -> None:
        """Claims no more; returns when what was claimed is computed or given back."""

    async def hand_over(self) -> None:
        """Returns when the contribution is handed over."""


class StateFailed(Exception):
    """A state of a change failed, for `error`."""

    def __init__(self, state: str, error: Exception) -> None:
        super().__init__(f"{state}: {_why(error)}")
        self.state = state
        self.error = error


class TurnedBack(Exception):
    """A change is no longer wanted."""


class RoleChange:
    """One change of one cell, whose weights are `version` as it begins. `turned_back` says why the change is
    no longer wanted, None while it is. `state` is the one that runs."""

    def __init__(
        self,
        cell: int,
        change: str = "",
        version: int = -1,
        *,
        ranks: AskRanks,
        group: GroupAddress,
        pull: Pull,
        release: Release,
        tell: TellState,
        turned_back: Callable[[], str | None] = lambda: None,
        training: Training | None = None,
        engine_over_ranks: bool = False,
    ) -> None:
        self._cell = cell
        self._change = change
        self._version = version
        self._ranks = ranks
        self._group = group
        self._pull = pull
        self._release = release
        self._tell = tell
        self._turned_back = turned_back
        self._training = training
        self._engine_over_ranks = engine_over_ranks
        self._times = StateTimes()
        self._entered: set[str] = set()
        self._snapshot: Snapshot | None = None
        self.state: str | None = None
        self._states: dict[str, Callable[[], Awaitable[Any]]] = {
            "sleep_engines": partial(ranks, SleepEngine()),
            "build_group": partial(self._meet, engine=False),
            "pull_training_weights": partial(self._take_snapshot, "training"),
            "begin_training": partial(self._load, BeginTraining),
            "finish_micro_step": self._finish_micro_step,
            "hand_over_contribution": self._hand_over_contribution,
            "end_training": partial(ranks, EndTraining()),
            "drop_group": partial(ranks, DropGroup()),
            "build_engine": partial(self._meet, engine=True),
            "pull_published_weights": partial(self._take_snapshot, "published"),
            "wake_engines": partial(self._load, WakeEngine),
            "update_engines": partial(self._load, UpdateEngine),
        }

    async def to_train(self) -> RoleChanged:
        """It ends in train role, or back in rollout role."""
        outcome: RoleOutcome = "turned_back"
        try:
            await self._through(TO_TRAIN)
            return self._ended("train", "done")
        except TurnedBack as turned:
            cause = str(turned)
        except StateFailed as failed:
            if failed.state not in TURN_BACK:
                raise failed.error from None
            outcome, cause = "failed", str(failed)
        finally:
            await self._let_go()
        if self._entered:
            await self._wake(("end_training", *WAKE), turning=False)
        return self._ended("rollout", outcome, cause)

    async def to_rollout(self) -> RoleChanged:
        """It ends in rollout role, or back in train role with the training loop at its end."""
        try:
            await self._wake(TO_ROLLOUT, turning=True)
            return self._ended("rollout", "done")
        except TurnedBack as turned:
            cause = str(turned)
        finally:
            await self._let_go()
        if not self._entered <= {*LEAVE_TRAINING}:
            await self._certainly(TO_TRAIN)
        return self._ended("train", "turned_back", cause)

    async def update(self) -> RoleChanged:
        """No change of role: engines that are awake take the published weights. If that fails some may have
        none by now: all sleep, and wake with them."""
        await self._wake(("pull_published_weights", "update_engines"), turning=False)
        return self._ended("rollout", "done")

    async def build_engine(self) -> None:
        """Ranks that are one engine meet, before it wakes."""
        await self._meet(engine=True)

    # --- how states follow each other ---------------------------------------------------------------

    async def _through(self, states: Iterable[str], *, turning: bool = True) -> None:
        """Raises StateFailed, and TurnedBack if `turning`."""
        for state in states:
            if turning and (why := self._turned_back()) is not None:
                raise TurnedBack(why)
            as_engine = state == "drop_group" and self._engine_over_ranks
            await self._pass("build_engine" if as_engine else state)

    async def _certainly(self, states: Iterable[str]) -> None:
        """There is no way back from these; what fails is raised as it is."""
        try:
            await self._through(states, turning=False)
        except StateFailed as failed:
            raise failed.error from None

    async def _wake(self, states: Iterable[str], *, turning: bool) -> None:
        try:
            await self._through(states, turning=turning)
        except StateFailed as failed:
            if failed.state not in TRIED_TWICE:
                raise failed.error from None
            # Some ranks may be awake.
            await self._certainly(("sleep_engines", *WAKE))

    async def _pass(self, state: str) -> None:
        self._entered.add(state)
        self.state = state
        began = time.monotonic()
        error: Exception | None = None
        try:
            with self._times.measure(state):
                await self._states[state]()
        except Exception as raised:
            error = raised
        self.state = None
        told = RoleState(
            cell=self._cell,
            change=self._change,
            state=state,
            seconds=round(time.monotonic() - began, 6),
            cause=None if error is None else _why(error),
        )
        await self._tell(told)
        if error is not None:
            raise StateFailed(state, error) from error

    def _ended(self, role: CellRole, outcome: RoleOutcome, cause: str = "") -> RoleChanged:
        states_s = self._times.by_state_s
        return RoleChanged(
            cell=self._cell,
            role=role,
            version=self._version,
            seconds=round(sum(states_s.values()), 6),
            states_s=states_s,
            outcome=outcome,
            cause=cause,
        )

    # --- the states ---------------------------------------------------------------------------------

    async def _meet(self, *, engine: bool) -> None:
        """A store that died while the ranks met there is no fault of theirs: they meet again at the next."""
        group = await self._group()
        while True:
            try:
                await self._ranks(msgspec.structs.replace(group, engine=engine))
                return
            except RemoteError:
                tried, group = group, await self._group()
                if (tried.host, tried.port) == (group.host, group.port):
                    raise

    async def _take_snapshot(self, kind: SnapshotKind) -> None:
        await self._let_go()
        self._snapshot = await self._pull(kind)

    async def _load(self, message: type[BeginTraining] | type[WakeEngine] | type[UpdateEngine]) -> None:
        assert self._snapshot is not None
        version = self._snapshot.version
        try:
            await self._ranks(message(version=version, region=self._snapshot.region))
        finally:
            await self._let_go()
        self._version = version

    async def _let_go(self) -> None:
        if self._snapshot is not None:
            snapshot, self._snapshot = self._snapshot, None
            await self._release(snapshot)

    async def _finish_micro_step(self) -> None:
        if self._training is not None:
            await self._training.finish()

    async def _hand_over_contribution(self) -> None:
        if self._training is not None:
            await self._training.hand_over()


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
