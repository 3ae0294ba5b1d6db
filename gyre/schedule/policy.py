"""The elastic policy: a pure function from what the cluster is to what may start now.

A burst is `burst_steps` (mu) steps whose executions are dispatched together. Within it w(t) = d(t) - f(t)
only falls, and cells leave rollout for training one by one, core first, each when the rest can carry w(t).
At its end weights are published, cells return, and the next burst is dispatched. Within it the last satellite
that trains may be called back, where more calls wait than executions do: see `call_back`.
"""

from __future__ import annotations

import msgspec

from gyre.schedule.state import (
    CellState,
    ClusterState,
    DispatchEval,
    DispatchGroups,
    Finish,
    Order,
    PublishWeights,
    ToRollout,
    ToTrain,
)

CORE = 0


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """mu = `burst_steps`, phi = `lead_steps`, B = `groups_per_step`, N = `group_size` executions a group.
    An evaluation follows every `eval_every` steps (0: never).

    `call_back`: a satellite returns within a burst when the calls that wait exceed so many times the rollout
    capacity C_R, and leaves for training only where no call would wait then: between the two lie
    `call_back` * C_R calls. 0 is the waterlevel alone, w(t) and nothing else."""

    burst_steps: int = 1
    lead_steps: int = 0
    groups_per_step: int
    group_size: int
    eval_every: int = 0
    call_back: float = 1.0


def decide(state: ClusterState, config: PolicyConfig) -> list[Order]:
    """The orders that may start now, to be carried out in order before the next call. Transitions are
    serial, so that there is at most one of a cell, and none while a cell is changing."""
    if state.draining or any(c.phase == "changing" for c in state.cells):
        return []
    if _burst_is_over(state, config):
        return [PublishWeights()] if _may_publish(state) else _recall(state)
    if _is_finished(state):
        return [Finish()]
    groups = groups_to_dispatch(state, config)
    if groups or state.eval_pending:
        return _start_burst(state, config, groups)
    return _recall(state) or _call_back(state, config) or _to_train(state, config)


def turns_back(state: ClusterState, config: PolicyConfig) -> ToTrain | ToRollout | None:
    """The opposite order to a cell that is changing: what it would be ordered at once if it were there."""
    changing = next((c for c in state.cells if c.phase == "changing" and c.to is not None), None)
    if changing is None or changing.to is None:
        return None
    there = msgspec.structs.replace(changing, phase=changing.to, to=None)
    cells = tuple(there if c is changing else c for c in state.cells)
    for order in decide(msgspec.structs.replace(state, cells=cells), config):
        match order:
            case ToTrain(cell=there.cell) | ToRollout(cell=there.cell):
                return order
    return None


def groups_to_dispatch(state: ClusterState, config: PolicyConfig) -> int:
    """How many groups are missing to Q_b = (phi + mu) * B dispatched and not yet trained ones, counted from
    the published step: once dispatched, nothing more is due within the burst, nor beyond the last step."""
    depth_steps = config.lead_steps + config.burst_steps
    last_step = min(state.steps, state.published + depth_steps)
    return max(0, last_step * config.groups_per_step - state.groups_dispatched)


def eval_due(config: PolicyConfig, *, published: int, steps: int, evaluated: int | None) -> bool:
    """Whether version `published` is to be evaluated: the first and the last version, and the first one
    published at or after every multiple of `eval_every`. `evaluated` was the last such version."""
    if config.eval_every == 0 or evaluated == published:
        return False
    if evaluated is None or published >= steps:
        return True
    return published // config.eval_every > evaluated // config.eval_every


def _burst_is_over(state: ClusterState, config: PolicyConfig) -> bool:
    if state.step >= state.steps:
        return state.published < state.step
    return state.step - state.published >= config.burst_steps


def _is_finished(state: ClusterState) -> bool:
    return state.step >= state.steps and not state.eval_pending and state.eval_running == 0


def _may_publish(state: ClusterState) -> bool:
    """An evaluation is pinned to the published version, which therefore stays until it ends."""
    return state.eval_running == 0 and any(c.cell == CORE and c.phase != "down" for c in state.cells)


def _start_burst(state: ClusterState, config: PolicyConfig, groups: int) -> list[Order]:
    """Cells return, last in the order first, then everything is dispatched at once."""
    coming = groups * config.group_size + (state.eval_executions if state.eval_pending else 0)
    back = _returning(state, coming)
    if back is not None:
        text = f"burst over: w+Q={state.unfinished}+{coming}, C_R={state.rollout_capacity}"
        return [ToRollout(cell=back.cell, waterlevel=text)]
    if state.rollout_capacity == 0:
        return []
    orders: list[Order] = [DispatchEval()] if state.eval_pending else []
    return [*orders, DispatchGroups(groups=groups)] if groups else orders


def _returning(state: ClusterState, coming: int) -> CellState | None:
    """The next cell to return at a burst boundary. The core stays if the next batch is ready and the rest
    can carry what is about to be dispatched."""
    cell = _last_training(state)
    if cell is None or cell.cell != CORE:
        return cell
    fits = 0 < state.rollout_capacity >= state.unfinished + coming
    return None if fits and _has_training_work(state) else cell


def _recall(state: ClusterState) -> list[Order]:
    """A training cell returns within a burst when rollout lost capacity (C_R fell below w: a cell died).
    The core, which holds the step's sum, only when nobody else rolls out and it has nothing to train."""
    cell = _last_training(state)
    short = state.unfinished > state.rollout_capacity
    if cell is None or not short:
        return []
    if cell.cell == CORE and (state.rollout_capacity > 0 or _has_training_work(state)):
        return []
    text = f"w={state.unfinished} > C_R={state.rollout_capacity}"
    return [ToRollout(cell=cell.cell, waterlevel=text)]


def _call_back(state: ClusterState, config: PolicyConfig) -> list[Order]:
    """A satellite returns within a burst when many more calls wait than w(t) lets expect: an execution whose
    sub-agents run side by side has several."""
    cell = _last_training(state)
    most = config.call_back * state.rollout_capacity
    if config.call_back == 0 or cell is None or cell.cell == CORE or state.waiting_calls <= most:
        return []
    text = f"waiting calls={state.waiting_calls} > {config.call_back:g}*C_R, C_R={state.rollout_capacity}"
    return [ToRollout(cell=cell.cell, waterlevel=text)]


def _to_train(state: ClusterState, config: PolicyConfig) -> list[Order]:
    """The first cell in rollout leaves if the core leads, there is work, and the rest can carry w(t)."""
    core_trains = any(c.cell == CORE and c.phase == "train" for c in state.cells)
    rollout = [c for c in state.cells if c.phase == "rollout"]
    if not rollout:
        return []
    cell = min(rollout, key=lambda c: c.cell)
    is_core = cell.cell == CORE
    work = _has_training_work(state) if is_core else state.ready_micro_steps > 0
    capacity = state.rollout_capacity
    if not work or not (is_core or core_trains) or state.unfinished > capacity - cell.capacity:
        return []
    if config.call_back > 0 and not is_core and state.calls > capacity - cell.capacity:
        return []
    text = f"w={state.unfinished} <= C_R-C_e = {capacity}-{cell.capacity}"
    return [ToTrain(cell=cell.cell, waterlevel=text)]


def _has_training_work(state: ClusterState) -> bool:
    """A complete step (all its micro-steps are accepted, or it has none) still needs its update."""
    return state.ready_micro_steps > 0 or state.step_complete


def _last_training(state: ClusterState) -> CellState | None:
    return max((c for c in state.cells if c.phase == "train"), key=lambda c: c.cell, default=None)
