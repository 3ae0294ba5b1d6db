"""A role change, one explicit list of states per direction.

rollout -> train: sleep_engines, build_group, pull_weights, begin_training (the cell's calls are handed over
before; its training loop starts after).
train -> rollout: end_training, drop_group, pull_weights, wake_engines (the training loop has ended before
and handed its contribution over). In rollout role ranks need no process group, and none stands:
gloo polls a hundred times a second as long as one does. Ranks that are one engine meet as such in place of
drop_group: build_engine.

Each state is timed. A state that fails fails the change, and the cell with it: its supervisor starts it
again in a known state, its claims return.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec

from gyre.actors import Ask, RemoteError
from gyre.cell.messages import CellRole, RoleChanged, Snapshot
from gyre.cell.worker_messages import (
    BeginTraining,
    BuildGroup,
    DropGroup,
    EndTraining,
    SleepEngine,
    UpdateEngine,
    WakeEngine,
)

AskRanks = Callable[[Ask[Any]], Awaitable[list[Any]]]
GroupAddress = Callable[[], Awaitable[BuildGroup]]
Pull = Callable[[Literal["training", "published"]], Awaitable[Snapshot]]
Release = Callable[[Snapshot], Awaitable[None]]


class RoleChange:
    """One change of one cell."""

    def __init__(
        self,
        cell: int,
        *,
        ranks: AskRanks,
        group: GroupAddress,
        pull: Pull,
        release: Release,
        engine_over_ranks: bool = False,
    ) -> None:
        self._cell = cell
        self._engine_over_ranks = engine_over_ranks
        self._ranks = ranks
        self._group = group
        self._pull = pull
        self._release = release
        self._states_s: dict[str, float] = {}
        self.state = "idle"

    async def to_train(self) -> RoleChanged:
        async with self._in("sleep_engines"):
            await self._ranks(SleepEngine())
        async with self._in("build_group"):
            await self._build_group(engine=False)
        async with self._in("pull_weights"):
            snapshot = await self._pull("training")
        async with self._in("begin_training"):
            await self._ranks(BeginTraining(version=snapshot.version, region=snapshot.region))
            await self._release(snapshot)
        return self._done("train", snapshot.version)

    async def to_rollout(self) -> RoleChanged:
        async with self._in("end_training"):
            await self._ranks(EndTraining())
        if self._engine_over_ranks:
            async with self._in("build_engine"):
                await self.build_engine()
        else:
            async with self._in("drop_group"):
                await self._ranks(DropGroup())
        async with self._in("pull_weights"):
            snapshot = await self._pull("published")
        async with self._in("wake_engines"):
            await self._ranks(WakeEngine(version=snapshot.version, region=snapshot.region))
            await self._release(snapshot)
        return self._done("rollout", snapshot.version)

    async def update(self) -> RoleChanged:
        """No change of role: engines that are awake take the published weights."""
        async with self._in("pull_weights"):
            snapshot = await self._pull("published")
        async with self._in("update_engines"):
            await self._ranks(UpdateEngine(version=snapshot.version, region=snapshot.region))
            await self._release(snapshot)
        return self._done("rollout", snapshot.version)

    async def build_engine(self) -> None:
        """Ranks that are one engine meet, before it wakes."""
        await self._build_group(engine=True)

    async def _build_group(self, *, engine: bool) -> None:
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

    @asynccontextmanager
    async def _in(self, state: str) -> AsyncIterator[None]:
        self.state = state
        began = time.monotonic()
        yield
        self._states_s[state] = round(time.monotonic() - began, 4)

    def _done(self, role: CellRole, version: int) -> RoleChanged:
        self.state = "done"
        return RoleChanged(
            cell=self._cell,
            role=role,
            version=version,
            seconds=round(sum(self._states_s.values()), 4),
            states_s=self._states_s,
        )
