"""The messages of the WaterlevelActor to the rooms above it, and theirs to it."""

from __future__ import annotations

from typing import Literal

import msgspec

from gyre.actors import Ask, Ref, Stream, Tell
from gyre.cell.messages import CellStatus


class OpenRoute(Ask[None], frozen=True, kw_only=True):
    """To the ProxyActor: this cell admits calls."""

    cell: int
    incarnation: int
    engines: tuple[Ref, ...]
    version: int
    capacity_calls: int
    window_tokens: int
    change: str = ""


class RouteClosed(msgspec.Struct, frozen=True, kw_only=True):
    """How a route was closed: the seconds of each state by name, in order; how many calls in flight were
    handed over, how many sessions' KV went elsewhere, how many of the calls are computed again there, and for
    what reasons sessions are that were to be moved and do not rest there."""

    calls: int
    sessions_moved: int = 0
    recomputed: int = 0
    kv_nbytes: int = 0
    recomputed_by: dict[str, int] = {}
    states_s: dict[str, float]


class CloseRoute(Ask[RouteClosed], frozen=True, kw_only=True):
    """To the ProxyActor: admit no more calls to this cell, end those in flight there and resume them
    elsewhere from their tokens so far. Answered when none is left at the cell. `lost`: the cell is dead, its
    calls cannot be asked for more tokens. `change` is the role change it belongs to, for who reads events."""

    cell: int
    lost: bool = False
    change: str = ""


class CallsInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """How many calls the proxy has taken and not answered."""

    calls: int


class WatchCalls(Stream[CallsInFlight], frozen=True, kw_only=True):
    """To the ProxyActor: how many now, and again whenever that has changed."""


class Dispatch(Tell, frozen=True, kw_only=True):
    """To the HarnessActor: start the executions of `groups` tasks of a split at the published version.
    With split `eval`, `groups` is ignored: each held-out task is run."""

    split: Literal["train", "eval"]
    groups: int
    version: int
    step: int


class ExecutionsDispatched(Tell, frozen=True, kw_only=True):
    """From the HarnessActor: d(t) grew by `executions`, of `groups` groups."""

    split: Literal["train", "eval"]
    executions: int
    groups: int


class ExecutionStarted(Tell, frozen=True, kw_only=True):
    """From the HarnessActor: p(t) grew by one. A repeated attempt does not count again."""

    execution: str


class ExecutionFinished(Tell, frozen=True, kw_only=True):
    """From the HarnessActor: f(t) grew by one, once per dispatched execution, dropped ones included."""

    execution: str
    split: Literal["train", "eval"]


class GroupFinished(Tell, frozen=True, kw_only=True):
    """From the TrajectoryActor: all executions of a training group have ended and it is planned."""

    group: str


class MicroStepsReady(Tell, frozen=True, kw_only=True):
    """From the MicroStepQueue, on change: how many micro-steps may be claimed now, and of which step.
    `complete`: the step waits for nothing but the core's update. `uncommitted` ones are of any step."""

    step: int
    unclaimed: int
    uncommitted: int
    complete: bool = False


class StepDone(Tell, frozen=True, kw_only=True):
    """From the MicroStepQueue: a step is committed and journalled."""

    step: int
    version: int


class EvalDone(Tell, frozen=True, kw_only=True):
    """From the TrajectoryActor: an evaluation is complete."""

    step: int
    version: int
    score: float
    executions: int


class Connect(Ask[None], frozen=True, kw_only=True):
    """To the WaterlevelActor: whom it gives orders to. It carries out none before."""

    proxy: Ref
    harness: Ref
    queue: Ref


class WaitFinished(Ask[None], frozen=True, kw_only=True):
    """To the WaterlevelActor: answered when the job is over, or drained. Ask with a long time-out."""


class Drain(Ask[None], frozen=True, kw_only=True):
    """To the WaterlevelActor: dispatch nothing more, write a checkpoint of the last complete step, answer."""


class ScheduleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a person sees of the schedule. `role_changes` were carried out; from the others a cell came back.
    `calls` and `waiting_calls` are what the policy sees of them. `checkpoint` is the folder of the newest one
    written, `saved` how many steps are in it."""

    dispatched: int
    started: int
    finished: int
    step: int
    steps: int
    published: int
    ready_micro_steps: int
    role_changes: int
    role_changes_with_calls_in_flight: int
    cells: tuple[CellStatus, ...]
    role_changes_turned_back: int = 0
    role_changes_failed: int = 0
    calls_moved: int = 0
    calls: int = 0
    waiting_calls: int = 0
    checkpoint: str | None = None
    saved: int | None = None


class GetSchedule(Ask[ScheduleStatus], frozen=True, kw_only=True):
    """To the WaterlevelActor."""
