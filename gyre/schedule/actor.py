"""The WaterlevelActor: messages become counters, the policy turns them into orders, it carries them out."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any

import msgspec
import structlog

from gyre.actors import Actor, ActorDied, ActorError, Down, handles
from gyre.cell.messages import CellGone, CellUp, Publish, RoleOutcome, RoleState
from gyre.schedule.checkpointing import Checkpointing
from gyre.schedule.counters import Counters
from gyre.schedule.messages import (
    CloseRoute,
    Connect,
    Dispatch,
    Drain,
    EvalDone,
    ExecutionFinished,
    ExecutionsDispatched,
    ExecutionStarted,
    GetSchedule,
    GroupFinished,
    MicroStepsReady,
    ScheduleStatus,
    StepDone,
    WaitFinished,
    WatchCalls,
)
from gyre.schedule.policy import CORE, PolicyConfig, decide, turns_back
from gyre.schedule.roster import CellLife, Roster
from gyre.schedule.state import (
    ClusterState,
    DispatchEval,
    DispatchGroups,
    Finish,
    Order,
    PublishWeights,
    ToRollout,
    ToTrain,
)
from gyre.schedule.transitions import CellError, Change, Transitions

log = structlog.get_logger()


class WaterlevelActorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`first_step` is how many steps were committed before this life of the job. A checkpoint is written
    after every `checkpoint_every_steps` steps (0: only at the end). `change_timeout_s` bounds each part of
    a role change, a publication and a checkpoint."""

    policy: PolicyConfig
    cells: int
    steps: int
    first_step: int = 0
    checkpoint_every_steps: int = 1
    change_timeout_s: float = 600.0
    status_timeout_s: float = 1.0


class CoreLost(RuntimeError):
    """The core died, and with it the sum of the step and the optimizer's state."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"cell {CORE}, the core, died: {reason}; go on from the newest checkpoint with --resume"
        )
        self.reason = reason


class DispatchUnanswered(RuntimeError):
    """The HarnessActor did not say what it dispatched."""

    def __init__(self, dispatch: Dispatch, timeout_s: float) -> None:
        super().__init__(f"the HarnessActor has not answered {dispatch} within {timeout_s:g} s")
        self.dispatch = dispatch
        self.timeout_s = timeout_s


class WaterlevelActor(Actor):
    """Orders are carried out one after another in the background, so that counters move on meanwhile; the
    policy is asked again after each order and each message. The core's death is this actor's."""

    def __init__(self, config: WaterlevelActorConfig) -> None:
        self._config = config
        self._counters = Counters(config.policy, first_step=config.first_step, steps=config.steps)
        self._cells = Roster(config.cells)
        self._burials: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._dispatched = asyncio.Event()
        self._over = asyncio.Event()
        self._checkpointing = Checkpointing(
            every_steps=config.checkpoint_every_steps,
            saved=config.first_step or None,
            timeout_s=config.change_timeout_s,
        )
        self._draining = False
        self._changes = 0
        self._role_changes: Counter[RoleOutcome] = Counter()
        self._under_calls = 0
        self._calls_moved = 0

    @handles(Connect)
    async def connect(self, message: Connect) -> None:
        self._proxy, self._harness, self._queue = message.proxy, message.harness, message.queue
        self._transitions = Transitions(message.proxy, self._config.change_timeout_s)
        self.context.run(self._carry_out_orders(), name="orders")
        if self._config.policy.call_back > 0:
            self.context.run(self._watch_calls(), name="calls")
        self.context.run(
            self._checkpointing.run(lambda: self._cells.core, lambda: self._counters.step), name="checkpoints"
        )

    # --- what is counted ------------------------------------------------------------------------

    @handles(ExecutionsDispatched)
    async def executions_dispatched(self, message: ExecutionsDispatched) -> None:
        self._counters.executions_dispatched(message)
        self._dispatched.set()
        self._changed.set()

    @handles(ExecutionStarted)
    async def execution_started(self, message: ExecutionStarted) -> None:
        self._counters.started += 1

    @handles(ExecutionFinished)
    async def execution_finished(self, message: ExecutionFinished) -> None:
        self._counters.finished += 1
        self._changed.set()

    @handles(GroupFinished)
    async def group_finished(self, message: GroupFinished) -> None:
        self._counters.group_finished(message.group)

    @handles(MicroStepsReady)
    async def micro_steps_ready(self, message: MicroStepsReady) -> None:
        self._counters.micro_steps_ready(message)
        self._changed.set()

    @handles(StepDone)
    async def step_done(self, message: StepDone) -> None:
        self._counters.step_done(message)
        self._checkpointing.step_done(self._counters.step)
        self._changed.set()

    @handles(EvalDone)
    async def eval_done(self, message: EvalDone) -> None:
        self._counters.eval_done(message.version)
        self._changed.set()

    async def _watch_calls(self) -> None:
        # Whoever started the proxy sees to it if it dies; at the end of a job it goes before this actor.
        with suppress(ActorDied):
            async with aclosing(self._proxy.stream(WatchCalls())) as seen:
                async for in_flight in seen:
                    self._counters.calls = in_flight.calls
                    self._changed.set()

    @handles(RoleState)
    async def role_state(self, message: RoleState) -> None:
        self._transitions.passed(message)

    # --- cells come and go ----------------------------------------------------------------------

    @handles(CellUp)
    async def cell_up(self, message: CellUp) -> None:
        before = self._cells.add(message)
        if before is not None:
            self._lose(before, "its next life is up")
        self.context.monitor(message.ref)
        log.info(
            "cell_up",
            cell=message.cell,
            incarnation=message.incarnation,
            role=message.role,
            version=message.version,
        )
        self._changed.set()

    @handles(Down)
    async def down(self, message: Down) -> None:
        life = self._cells.of(message.ref)
        if life is not None:
            self._lose(life, message.reason.brief, expected=not message.reason.abnormal)

    def _lose(self, life: CellLife, reason: str, *, expected: bool = False) -> None:
        """A life is over. Raises CoreLost, unless the job is, or it was told to end."""
        if life.is_dead:
            return
        life.become("dead")
        if self._over.is_set():
            return
        level = logging.INFO if expected else logging.WARNING
        log.log(level, "cell_down", cell=life.cell, incarnation=life.up.incarnation, reason=reason)
        if life.cell == CORE and not expected:
            raise CoreLost(reason)
        self._burials[life.cell] = self.context.run(self._bury(life), name=f"bury cell {life.cell}")
        self._changed.set()

    async def _bury(self, life: CellLife) -> None:
        """At once, whatever order is being carried out: its calls go on elsewhere, its claims return."""
        timeout_s = self._config.change_timeout_s
        await self._proxy.ask(CloseRoute(cell=life.cell, lost=True), timeout_s=timeout_s)
        gone = CellGone(cell=life.cell, incarnation=life.up.incarnation)
        await self._queue.ask(gone, timeout_s=timeout_s)

    # --- orders ---------------------------------------------------------------------------------

    async def _carry_out_orders(self) -> None:
        log.info("burst", first_step=self._counters.published, steps=self._config.policy.burst_steps)
        while not self._over.is_set():
            await self._admit()
            orders = decide(self._state(), self._config.policy)
            for order in orders:
                await self._carry_out(order)
            if not orders:
                await self._changed.wait()
                self._changed.clear()

    async def _carry_out(self, order: Order) -> None:
        match order:
            case ToTrain() | ToRollout():
                await self._change_role(order)
            case PublishWeights():
                await self._publish()
            case DispatchGroups(groups=groups):
                await self._dispatch(Dispatch(split="train", groups=groups, **self._now_at()))
            case DispatchEval():
                self._counters.eval_begins()
                await self._dispatch(Dispatch(split="eval", groups=0, **self._now_at()))
            case Finish():
                await self._finish()

    async def _admit(self) -> None:
        for life in self._cells.standing("new"):
            if life.cell in self._burials:
                await asyncio.wait([self._burials.pop(life.cell)])
            try:
                await self._transitions.admit(life, self._counters.published)
            except CellError as error:
                self._lose(life, str(error))

    async def _change_role(self, order: ToTrain | ToRollout) -> None:
        self._changes += 1
        change = Change(self._changes, self._cells[order.cell], order.waterlevel)
        run = self._transitions.to_train if isinstance(order, ToTrain) else self._transitions.to_rollout
        watch = self.context.run(self._turn_back_if_unwanted(change), name=f"watch {change.id}")
        try:
            outcome = await run(change)
        except CellError as error:
            self._transitions.lost(change, str(error))
            return self._lose(change.life, str(error))
        finally:
            watch.cancel()
        self._role_changes[outcome] += 1
        self._under_calls += change.calls > 0
        self._calls_moved += change.calls

    async def _turn_back_if_unwanted(self, change: Change) -> None:
        """While the cell changes the counters move on, and what was right may be so no longer."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            opposite = turns_back(self._state(), self._config.policy)
            if opposite is not None:
                await self._transitions.turn_back(change, opposite.waterlevel)
                return

    async def _publish(self) -> None:
        began = asyncio.get_running_loop().time()
        core = self._cells[CORE]
        try:
            version = await core.up.ref.ask(Publish(), timeout_s=self._config.change_timeout_s)
        except ActorError as error:
            return self._lose(core, str(error))
        self._counters.published = version
        rollout = self._cells.standing("rollout")
        for life, fault in zip(rollout, await self._transitions.update_all(rollout), strict=True):
            if fault is not None:
                self._lose(life, str(fault))
        log.info(
            "publish",
            version=version,
            cells=[life.cell for life in rollout],
            seconds=round(asyncio.get_running_loop().time() - began, 4),
        )
        if version < self._config.steps:
            log.info("burst", first_step=version, steps=self._config.policy.burst_steps)

    async def _dispatch(self, message: Dispatch) -> None:
        """Returns when d(t) has grown: nothing may be decided on the w(t) before."""
        self._dispatched.clear()
        before = self._counters.dispatched
        await self._harness.tell(message)
        try:
            async with asyncio.timeout(self._config.change_timeout_s):
                await self._dispatched.wait()
        except TimeoutError:
            raise DispatchUnanswered(message, self._config.change_timeout_s) from None
        log.info(
            "dispatch",
            split=message.split,
            groups=message.groups,
            executions=self._counters.dispatched - before,
            version=message.version,
            step=message.step,
        )

    async def _finish(self) -> None:
        await self._checkpointing.save(self._cells.core, self._counters.step)
        log.info("finish", step=self._counters.step, version=self._counters.published)
        self._over.set()

    def _state(self) -> ClusterState:
        return self._counters.state(self._cells.states(), draining=self._draining)

    def _now_at(self) -> dict[str, int]:
        return {"version": self._counters.published, "step": self._counters.step}

    # --- the end, and looking in ----------------------------------------------------------------

    @handles(Drain, concurrent=True)
    async def drain(self, message: Drain) -> None:
        self._draining = True
        log.info("drain", step=self._counters.step)
        await self._checkpointing.save(self._cells.core, self._counters.step)
        self._over.set()
        self._changed.set()

    @handles(WaitFinished, concurrent=True)
    async def wait_finished(self, message: WaitFinished) -> None:
        await self._over.wait()

    def summary(self) -> Mapping[str, Any]:
        counters = self._counters
        return {
            "step": counters.step,
            "steps": counters.steps,
            "published": counters.published,
            "dispatched": counters.dispatched,
            "finished": counters.finished,
            "ready_micro_steps": counters.ready_micro_steps,
            "role_changes": self._role_changes["done"],
            "role_changes_turned_back": self._role_changes["turned_back"],
            "role_changes_failed": self._role_changes["failed"],
            "calls": counters.calls,
            "cells": " ".join(f"{cell.cell}:{cell.phase}" for cell in self._cells.states()),
            "draining": self._draining,
        }

    @handles(GetSchedule, concurrent=True)
    async def schedule(self, message: GetSchedule) -> ScheduleStatus:
        counters = self._counters
        return ScheduleStatus(
            dispatched=counters.dispatched,
            started=counters.started,
            finished=counters.finished,
            step=counters.step,
            steps=counters.steps,
            published=counters.published,
            ready_micro_steps=counters.ready_micro_steps,
            role_changes=self._role_changes["done"],
            role_changes_with_calls_in_flight=self._under_calls,
            role_changes_turned_back=self._role_changes["turned_back"],
            role_changes_failed=self._role_changes["failed"],
            calls_moved=self._calls_moved,
            calls=counters.calls,
            waiting_calls=self._state().waiting_calls,
            cells=await self._cells.statuses(self._config.status_timeout_s),
            checkpoint=self._checkpointing.folder,
            saved=self._checkpointing.saved,
        )
