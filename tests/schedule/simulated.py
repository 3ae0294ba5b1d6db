"""A cluster that does what the policy orders, one random event at a time."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from gyre.schedule.policy import PolicyConfig, decide, eval_due, turns_back
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

EVAL_EXECUTIONS = 2


class SimulatedCluster:
    """Executions finish only at a rollout cell, micro-steps are computed only by training cells of a
    prefix, cells die and come back; `check` sees the state before each order that was made."""

    def __init__(
        self,
        *,
        config: PolicyConfig,
        capacities: list[int],
        steps: int,
        seed: int,
        deaths: int,
        check: Callable[[ClusterState, Order], None],
    ) -> None:
        self._config = config
        self._random = random.Random(seed)
        self._deaths = deaths
        self._check = check
        self._cells = {
            n: CellState(cell=n, phase="down", capacity=c, version=0) for n, c in enumerate(capacities)
        }
        self._change: ToTrain | ToRollout | None = None
        self._left: dict[int, int] = {}
        self._evals: list[int] = []
        self._ready: dict[int, int] = {}
        self._planned: dict[int, int] = {}
        self._evaluated: int | None = None
        self._groups = 0
        self._calls = 0
        self._dispatched = self._finished = self._step = self._published = 0
        self._steps = steps
        self.is_finished = False

    def state(self) -> ClusterState:
        step = self._step
        sealed = self._planned.get(step, 0) == self._config.groups_per_step
        return ClusterState(
            cells=tuple(self._cells.values()),
            dispatched=self._dispatched,
            started=self._dispatched,
            finished=self._finished,
            step=step,
            steps=self._steps,
            published=self._published,
            groups_dispatched=self._groups,
            groups_finished=sum(self._planned.values()),
            ready_micro_steps=self._ready.get(step, 0),
            step_complete=sealed and self._ready.get(step, 0) == 0,
            eval_pending=eval_due(
                self._config, published=self._published, steps=self._steps, evaluated=self._evaluated
            ),
            eval_running=1 if self._evals else 0,
            eval_executions=EVAL_EXECUTIONS,
            calls=self._calls,
        )

    def run(self, max_events: int) -> None:
        for _ in range(max_events):
            self._settle()
            if self.is_finished:
                return
            events = self._events()
            assert len(events) > 1, f"deadlock: {self.state()}"
            self._random.choice(events)()

    def _settle(self) -> None:
        """Carries out orders until the policy wants nothing: it must come to rest."""
        for _ in range(20):
            orders = decide(self.state(), self._config)
            if not orders:
                return
            for order in orders:
                self._check(self.state(), order)
                self._carry_out(order)
            if self.is_finished:
                return
        raise AssertionError(f"the policy does not come to rest: {self.state()}")

    def _carry_out(self, order: Order) -> None:
        match order:
            case ToTrain() | ToRollout():
                self._change = order
                self._phase(order.cell, "changing")
                to = "train" if isinstance(order, ToTrain) else "rollout"
                self._cells[order.cell] = msgspec.structs.replace(self._cells[order.cell], to=to)
            case PublishWeights():
                self._published = self._step
            case DispatchGroups(groups=groups):
                for group in range(self._groups, self._groups + groups):
                    self._left[group] = self._config.group_size
                self._groups += groups
                self._dispatched += groups * self._config.group_size
            case DispatchEval():
                self._evaluated = self._published
                self._evals = [1] * EVAL_EXECUTIONS
                self._dispatched += EVAL_EXECUTIONS
            case Finish():
                self.is_finished = True

    def _events(self) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        phases = [c.phase for c in self._cells.values()]
        if "rollout" in phases:
            events += [self._finish_train] * 3 * bool(self._left)
            events += [self._finish_eval] * 3 * bool(self._evals)
        if phases[0] == "train":
            events += [self._train] * (self.state().ready_micro_steps > 0)
            events += [self._commit] * self.state().step_complete
        if self._change is not None:
            events.append(self._changed)
            events += [self._turn_back] * (turns_back(self.state(), self._config) is not None)
        events.append(self._call)
        down = [c.cell for c in self._cells.values() if c.phase == "down"]
        events += [lambda n=n: self._phase(n, "rollout") for n in down]
        alive = [c.cell for c in self._cells.values() if c.cell and c.phase != "down"]
        if self._deaths and alive and self._random.random() < 0.1:
            events.append(lambda: self._die(self._random.choice(alive)))
        return events

    def _finish_train(self) -> None:
        group = self._random.choice(list(self._left))
        self._finished += 1
        self._left[group] -= 1
        if self._left[group] == 0:
            del self._left[group]
            step = group // self._config.groups_per_step
            self._planned[step] = self._planned.get(step, 0) + 1
            self._ready[step] = self._ready.get(step, 0) + self._random.randrange(4)

    def _finish_eval(self) -> None:
        self._finished += 1
        self._evals.pop()

    def _train(self) -> None:
        self._ready[self._step] -= 1

    def _commit(self) -> None:
        self._step += 1

    def _changed(self) -> None:
        assert self._change is not None
        self._phase(self._change.cell, "train" if isinstance(self._change, ToTrain) else "rollout")

    def _turn_back(self) -> None:
        assert self._change is not None
        self._phase(self._change.cell, "rollout" if isinstance(self._change, ToTrain) else "train")

    def _call(self) -> None:
        """An execution has any number of calls in flight."""
        self._calls = self._random.randrange(3 * (self._dispatched - self._finished) + 1)

    def _die(self, cell: int) -> None:
        self._deaths -= 1
        if self._cells[cell].phase == "train" and self._random.random() < 0.5:
            self._ready[self._step] = self._ready.get(self._step, 0) + 1
        self._phase(cell, "down")

    def _phase(self, cell: int, phase: str) -> None:
        if self._change is not None and self._change.cell == cell and phase != "changing":
            self._change = None
        self._cells[cell] = msgspec.structs.replace(self._cells[cell], phase=phase)
