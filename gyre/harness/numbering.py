"""Which executions a dispatch starts: numbers, names and tasks of groups; on resume, only what is missing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gyre.harness.tasks import Task, TaskOrder, TasksError
from gyre.trajectory.messages import IncompleteGroup, ResumeState
from gyre.trajectory.records import ExecutionSpec


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """An execution to be started."""

    spec: ExecutionSpec
    task: Task


class Numbering:
    """Training groups count from `first_group`, evaluations go on where the journal's end. Of a group that an
    earlier life of the job began, only the executions that had not ended are planned."""

    def __init__(
        self,
        tasks: Sequence[Task],
        held_out: Sequence[Task],
        *,
        seed: int,
        group_size: int,
        runs: int,
        first_group: int,
        resume: ResumeState,
    ) -> None:
        self._order = TaskOrder(tasks, seed)
        self._tasks = {task.name: task for task in tasks}
        self._held_out = tuple(held_out)
        self._group_size = group_size
        self._runs = runs
        self._next_group = first_group
        self._next_eval = resume.next_eval
        self._finished = frozenset(resume.finished)
        self._incomplete = {group.group: group for group in resume.incomplete}

    def groups(self, count: int, version: int, step: int) -> list[Planned]:
        """The executions of the next `count` training groups that have not ended. Raises TasksError."""
        planned: list[Planned] = []
        for number in range(self._next_group, self._next_group + count):
            planned += self._group(number, version, step)
        self._next_group += count
        return planned

    def evaluation(self, version: int, step: int) -> list[Planned]:
        """All held-out tasks, `runs` times each, as one group."""
        group = f"e{self._next_eval:06d}"
        self._next_eval += 1
        count = len(self._held_out) * self._runs
        return [
            Planned(spec=_spec(group, index, count, task, version, step), task=task)
            for index, task in enumerate(task for task in self._held_out for _ in range(self._runs))
        ]

    def _group(self, number: int, version: int, step: int) -> list[Planned]:
        group = f"g{number:06d}"
        if group in self._finished:
            return []
        begun = self._incomplete.get(group)
        task = self._order.task(number) if begun is None else self._task_of(begun)
        specs = [_spec(group, i, self._group_size, task, version, step) for i in range(self._group_size)]
        if begun is not None:
            specs = [
                msgspec.structs.replace(spec, refill=begun.refills.get(spec.execution, 0))
                for spec in specs
                if spec.execution not in begun.ended
            ]
        return [Planned(spec=spec, task=task) for spec in specs]

    def _task_of(self, begun: IncompleteGroup) -> Task:
        try:
            return self._tasks[begun.task]
        except KeyError:
            problem = f"is gone, but {begun.group} was begun with it"
            raise TasksError(begun.task, problem, "bring it back, or start a new run") from None


def _spec(group: str, index: int, count: int, task: Task, version: int, step: int) -> ExecutionSpec:
    width = max(2, len(str(count - 1)))
    return ExecutionSpec(
        execution=f"{group}.{index:0{width}d}",
        group=group,
        task=task.name,
        split="eval" if group.startswith("e") else "train",
        index=index,
        attempt=1,
        version_dispatched=version,
        group_executions=count,
        step=step,
    )
