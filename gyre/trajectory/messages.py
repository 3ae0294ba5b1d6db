"""The messages of the TrajectoryActor to the MicroStepQueue, and those that the job asks it."""

from __future__ import annotations

import msgspec

from gyre.actors import Ask, Ref, Stream
from gyre.loss.microstep import MicroStep
from gyre.trajectory.records import CallRecord


class AddGroup(Ask[None], frozen=True, kw_only=True):
    """To the MicroStepQueue: a training group has ended and is planned. `step` is the group's number // B,
    `executions` how many of it count in the step's mean. A group without a learning signal brings no
    micro-steps but its executions; a discarded one brings `executions = 0`. Each group of a step is added,
    so a step is complete when B groups are. It may be asked again with the same content (after a restart
    the groups of the journal are planned again): the repetition changes nothing."""

    group: str
    step: int
    executions: int
    micro_steps: tuple[MicroStep, ...]


class SetWaterlevel(Ask[None], frozen=True, kw_only=True):
    """To the TrajectoryActor: whom to tell GroupFinished and EvalDone. What was finished before is told
    at once, so a group may be told more than once: receivers count group ids."""

    ref: Ref


class StepReward(msgspec.Struct, frozen=True, kw_only=True):
    """Mean score of the scored executions of a step's groups so far."""

    step: int
    mean: float
    executions: int


class EvalScore(msgspec.Struct, frozen=True, kw_only=True):
    """Mean score of an evaluation's scored executions."""

    step: int
    version: int
    score: float
    executions: int


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all ended executions of the run, evaluation included, earlier lives of the job too.
    `rewards` are those of training groups. Each token sampled for a group that is complete is one of
    `trained_tokens` or of `excluded_tokens`, by reason."""

    executions: int
    dropped: int
    calls: int
    sampled_tokens: int
    compactions: int
    sub_agents: int
    retries: int
    rewards: tuple[StepReward, ...]
    evals: tuple[EvalScore, ...]
    trained_tokens: int = 0
    excluded_tokens: dict[str, int] = {}
    groups_without_signal: int = 0
    tool_calls: int = 0
    malformed_tool_calls: int = 0


class GetTotals(Ask[Totals], frozen=True, kw_only=True):
    """To the TrajectoryActor."""


class GetCalls(Stream[CallRecord], frozen=True, kw_only=True):
    """To the TrajectoryActor: those of an execution's attempt that are durable, in the order they were
    recorded."""

    execution: str


class IncompleteGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A training group that was begun: `ended` are its executions that need not run again, `refills` those
    of the others that had been dropped, and how often."""

    group: str
    task: str
    ended: tuple[str, ...]
    refills: dict[str, int] = {}


class ResumeState(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal holds of steps that are not trained yet, in order of group number. `finished` groups
    are complete and planned again. `next_group` and `next_eval` are the first numbers never used.
    An evaluation that was not complete is forgotten: it is dispatched anew."""

    finished: tuple[str, ...]
    incomplete: tuple[IncompleteGroup, ...]
    next_group: int
    next_eval: int


class GetResume(Ask[ResumeState], frozen=True, kw_only=True):
    """To the TrajectoryActor: its state of groups now; right after the start, what to go on with."""
