"""What a policy sees and what it may order: small frozen data, no clock, no I/O."""

from __future__ import annotations

from typing import Literal

import msgspec

from gyre.cell.messages import CellRole

CellPhase = Literal["rollout", "train", "changing", "down"]


class CellState(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: what it does now and how many executions it can carry in rollout role. `to` is the role that
    a changing one changes to."""

    cell: int
    phase: CellPhase
    capacity: int
    version: int
    to: CellRole | None = None


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of executions only grow: `dispatched` d(t), `started` p(t), `finished` f(t), evaluation
    included. `step` counts committed steps, `published` is the version that rollout serves, so it is also
    the first step of the running burst; both are absolute, as are `groups_dispatched` and
    `groups_finished`, which count training groups only. `ready_micro_steps` of the current step may be
    claimed; with `step_complete` it waits for nothing but the core's update. `eval_running` counts
    evaluations; `eval_executions` is how many executions one has, as far as is known. `calls` are in flight
    at the proxy, whether an engine has them or none."""

    cells: tuple[CellState, ...]
    dispatched: int
    started: int
    finished: int
    standalone_capacity: int = 0
    step: int
    steps: int
    published: int
    groups_dispatched: int
    groups_finished: int
    ready_micro_steps: int
    step_complete: bool = False
    eval_pending: bool
    eval_running: int
    eval_executions: int = 0
    calls: int = 0
    draining: bool = False

    @property
    def unfinished(self) -> int:
        """w(t) = d(t) - f(t)."""
        return self.dispatched - self.finished

    @property
    def rollout_capacity(self) -> int:
        """C_R(t)."""
        return self.standalone_capacity + sum(c.capacity for c in self.cells if c.phase == "rollout")

    @property
    def waiting_calls(self) -> int:
        """Calls beyond what the cells in rollout serve at a time."""
        return max(0, self.calls - self.rollout_capacity)


class ToTrain(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Cell leaves rollout, allowed by `waterlevel`, the inequality as text with its numbers."""

    cell: int
    waterlevel: str


class ToRollout(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Cell returns to rollout with the published weights."""

    cell: int
    waterlevel: str


class PublishWeights(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The training weights become the published ones: the burst is over."""


class DispatchGroups(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Start the executions of so many more training groups."""

    groups: int


class DispatchEval(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Start an evaluation, pinned to the published version."""


class Finish(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All steps are done and evaluated: the job is over."""


Order = ToTrain | ToRollout | PublishWeights | DispatchGroups | DispatchEval | Finish
