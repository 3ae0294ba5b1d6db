"""What the WaterlevelActor has counted, made into the state that a policy sees."""

from __future__ import annotations

from collections.abc import Iterable

from gyre.schedule.messages import ExecutionsDispatched, MicroStepsReady, StepDone
from gyre.schedule.policy import PolicyConfig, eval_due
from gyre.schedule.state import CellState, ClusterState


class Counters:
    """d(t), p(t), f(t), groups, steps, versions and evaluations; all of them only grow."""

    def __init__(self, policy: PolicyConfig, *, first_step: int, steps: int) -> None:
        self.policy = policy
        self.steps = steps
        self.step = first_step
        self.published = first_step
        self.dispatched = 0
        self.started = 0
        self.finished = 0
        self.groups_dispatched = first_step * policy.groups_per_step
        self.ready_micro_steps = 0
        self.calls = 0
        self._groups_finished: set[str] = set()
        self._groups_before = self.groups_dispatched
        self._step_complete = False
        self._evaluated: int | None = None
        self._evaluating: int | None = None
        self._eval_executions = 0

    def executions_dispatched(self, message: ExecutionsDispatched) -> None:
        self.dispatched += message.executions
        if message.split == "train":
            self.groups_dispatched += message.groups
            return
        self._eval_executions = message.executions
        if message.executions == 0:
            # No held-out tasks: nothing will report.
            self._evaluating = None

    def group_finished(self, group: str) -> None:
        self._groups_finished.add(group)

    def micro_steps_ready(self, message: MicroStepsReady) -> None:
        self.ready_micro_steps = message.unclaimed
        self._step_complete = message.complete

    def step_done(self, message: StepDone) -> None:
        """What is ready of the next step is told next."""
        self.step = message.step + 1
        self.ready_micro_steps = 0
        self._step_complete = False

    def eval_begins(self) -> None:
        """Of the published version, which is evaluated once."""
        self._evaluated = self._evaluating = self.published

    def eval_done(self, version: int) -> None:
        if version == self._evaluating:
            self._evaluating = None

    def state(self, cells: Iterable[CellState], *, draining: bool) -> ClusterState:
        return ClusterState(
            cells=tuple(cells),
            dispatched=self.dispatched,
            started=self.started,
            finished=self.finished,
            step=self.step,
            steps=self.steps,
            published=self.published,
            groups_dispatched=self.groups_dispatched,
            groups_finished=self._groups_before + len(self._groups_finished),
            ready_micro_steps=self.ready_micro_steps,
            step_complete=self._step_complete,
            eval_pending=eval_due(
                self.policy, published=self.published, steps=self.steps, evaluated=self._evaluated
            ),
            eval_running=0 if self._evaluating is None else 1,
            eval_executions=self._eval_executions,
            calls=self.calls,
            draining=draining,
        )
