"""The MicroStepQueue: its core behind messages, with the journal, time and whoever needs to know."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog

from gyre.actors import Actor, Ask, Ref, Tell, Timer, handles
from gyre.cell.messages import (
    Accept,
    CellGone,
    Claim,
    HandOver,
    Idle,
    Lease,
    ReturnLease,
    Stale,
    StepCommitted,
    StepComplete,
    StopClaiming,
)
from gyre.schedule.messages import MicroStepsReady, StepDone
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import AddGroup
from gyre.trajectory.queue import Answer, QueueConfig, QueueCore, QueueState, QueueTotals
from gyre.trajectory.rows import StepMember

log = structlog.get_logger()


class GetQueueTotals(Ask[QueueTotals], frozen=True, kw_only=True):
    """To the MicroStepQueue: what was committed in this life of the job."""


class TimePassed(Tell, frozen=True, kw_only=True):
    """To itself: a lease or a claim's patience may be over."""


class MicroStepQueue(Actor):
    """What is answered is durable before. Claims wait concurrently; all else is handled one by one, and only
    that ends leases: a contribution that was found valid still is when it has been journalled."""

    def __init__(self, config: QueueConfig, journal: Journal, waterlevel: Ref) -> None:
        self._core = QueueCore(config)
        self._journal = journal
        self._waterlevel = waterlevel
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._keys = itertools.count()
        self._wake: Timer | None = None
        self._told: QueueState | None = None

    def summary(self) -> Mapping[str, Any]:
        return {
            **msgspec.structs.asdict(self._core.state()),
            "claims_waiting": len(self._answers),
            "steps_committed": self._core.totals.steps,
            "satellite_micro_steps": self._core.totals.satellite_micro_steps,
        }

    @handles(AddGroup)
    async def add_group(self, message: AddGroup) -> None:
        if not self._core.is_new(message.group, message.step, message.micro_steps):
            return
        member = StepMember(
            step=message.step,
            group=message.group,
            executions=message.executions,
            micro_steps=tuple(m.id for m in message.micro_steps),
        )
        await self._journal.write(member)
        self._core.add_group(message.group, message.step, message.executions, message.micro_steps)
        await self._changed()

    @handles(Claim, concurrent=True)
    async def claim(self, message: Claim) -> Lease | HandOver | StepComplete | Idle | Stale:
        key = next(self._keys)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        self._core.claim(key, message, self._now())
        try:
            await self._changed()
            return await answer
        finally:
            del self._answers[key]
            self._core.withdraw(key)

    @handles(StopClaiming)
    async def stop_claiming(self, message: StopClaiming) -> None:
        self._core.stop_claiming(message.cell, message.incarnation)
        await self._changed()

    @handles(ReturnLease)
    async def return_lease(self, message: ReturnLease) -> None:
        self._core.return_lease(message.cell, message.incarnation, message.token)
        await self._changed()

    @handles(Accept)
    async def accept(self, message: Accept) -> bool:
        manifest = message.manifest
        if self._core.verdict(manifest) == "new":
            await self._journal.write(manifest)
        accepted = self._core.accept(manifest)
        if not accepted:
            log.warning(
                "contribution_refused",
                cell=manifest.cell,
                incarnation=manifest.incarnation,
                step=manifest.step,
                micro_steps=len(manifest.micro_steps),
            )
        await self._changed()
        return accepted

    @handles(StepCommitted)
    async def step_committed(self, message: StepCommitted) -> None:
        if not self._core.check_commit(message.step, message.version):
            return
        await self._journal.write(message)
        executions = self._core.executions(message.step)
        self._core.commit(message.step, message.version)
        _log_step(message, executions)
        await self._waterlevel.tell(StepDone(step=message.step, version=message.version))
        await self._changed()

    @handles(CellGone)
    async def cell_gone(self, message: CellGone) -> None:
        returned = self._core.cell_gone(message.cell, message.incarnation)
        if returned:
            log.info(
                "leases_returned", cell=message.cell, incarnation=message.incarnation, micro_steps=returned
            )
        await self._changed()

    @handles(TimePassed)
    async def time_passed(self, message: TimePassed) -> None:
        for (cell, incarnation), count in self._core.expire(self._now()).items():
            log.warning("lease_expired", cell=cell, incarnation=incarnation, micro_steps=count)
        await self._changed()

    @handles(GetQueueTotals)
    async def totals(self, message: GetQueueTotals) -> QueueTotals:
        return self._core.totals

    async def _changed(self) -> None:
        """After every change: answers claims, sets the timer, tells the WaterlevelActor if it matters."""
        now = self._now()
        for key, answer in self._core.poll(now):
            if not self._answers[key].done():
                self._answers[key].set_result(answer)
        self._set_timer(now)
        state = self._core.state()
        if state != self._told:
            self._told = state
            await self._waterlevel.tell(
                MicroStepsReady(
                    step=state.step,
                    unclaimed=state.unclaimed,
                    uncommitted=state.uncommitted,
                    complete=state.complete,
                )
            )

    def _set_timer(self, now: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        at = self._core.next_wake(now)
        if at is not None:
            self._wake = self.context.tell_after(at - now, TimePassed())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _log_step(message: StepCommitted, executions: int) -> None:
    """Sums become means: loss over executions, clipping over trajectories, the rest over trained tokens."""
    stats = message.stats
    trained = max(stats.trained_tokens, 1)
    log.info(
        "step",
        step=message.step,
        version=message.version,
        executions=executions,
        grad_norm=message.grad_norm,
        lr=message.lr,
        loss=stats.loss / max(executions, 1),
        clip_fraction=stats.clipped / max(stats.trajectories, 1),
        entropy=stats.entropy / trained,
        drift=stats.logprob_drift / trained,
        trained_tokens=stats.trained_tokens,
        tokens=stats.tokens,
        micro_steps=stats.micro_steps,
        micro_steps_by_cell=message.micro_steps_by_cell,
        cells=message.cells,
        seconds=message.seconds,
    )
