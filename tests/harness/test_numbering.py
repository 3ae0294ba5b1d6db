from pathlib import Path
from typing import Any

import pytest

from gyre.harness.numbering import Numbering, Planned
from gyre.harness.tasks import Task, TasksError
from gyre.trajectory.messages import IncompleteGroup, ResumeState

TASKS = [Task(name=f"t{i}", folder=Path("/t"), prompt="p") for i in range(5)]
HELD_OUT = [Task(name=f"h{i}", folder=Path("/h"), prompt="p") for i in range(2)]


def numbering(**changes: Any) -> Numbering:
    state: dict[str, Any] = {"finished": (), "incomplete": (), "next_group": 0, "next_eval": 0}
    own = {name: changes.pop(name) for name in tuple(changes) if name in state}
    arguments: dict[str, Any] = {"seed": 0, "group_size": 3, "runs": 2, "first_group": 0, **changes}
    return Numbering(TASKS, HELD_OUT, resume=ResumeState(**{**state, **own}), **arguments)


def executions(planned: list[Planned]) -> list[str]:
    return [p.spec.execution for p in planned]


def test_groups_count_on_from_dispatch_to_dispatch() -> None:
    numbers = numbering()
    assert executions(numbers.groups(1, version=0, step=0)) == ["g000000.00", "g000000.01", "g000000.02"]
    assert {p.spec.group for p in numbers.groups(2, version=1, step=1)} == {"g000001", "g000002"}


def test_a_group_has_one_task_and_says_what_it_is() -> None:
    planned = numbering().groups(1, version=4, step=3)
    assert len({p.task.name for p in planned}) == 1
    spec = planned[2].spec
    assert (spec.split, spec.index, spec.attempt, spec.group_executions) == ("train", 2, 1, 3)
    assert (spec.version_dispatched, spec.step, spec.task) == (4, 3, planned[2].task.name)


def test_an_evaluation_is_one_group_of_all_held_out_tasks() -> None:
    numbers = numbering(next_eval=7)
    planned = numbers.evaluation(version=2, step=2)
    assert executions(planned) == [f"e000007.{i:02d}" for i in range(4)]
    assert [p.task.name for p in planned] == ["h0", "h0", "h1", "h1"]
    assert {(p.spec.split, p.spec.group_executions) for p in planned} == {("eval", 4)}
    assert {p.spec.group for p in numbers.evaluation(version=3, step=3)} == {"e000008"}


def test_names_of_large_groups_sort_by_index() -> None:
    names = executions(numbering(group_size=128).groups(1, version=0, step=0))
    assert names == sorted(names) and names[-1] == "g000000.127"


def test_a_resumed_job_plans_only_what_is_missing() -> None:
    task = numbering().groups(6, version=0, step=0)[-1].task.name
    ended = ("g000005.00", "g000005.02")
    begun = IncompleteGroup(group="g000005", task=task, ended=ended, refills={"g000005.01": 2})
    resumed = numbering(first_group=4, finished=("g000004",), incomplete=(begun,), next_group=6)
    planned = resumed.groups(3, version=2, step=2)
    assert executions(planned) == ["g000005.01", "g000006.00", "g000006.01", "g000006.02"]
    assert planned[0].task.name == task
    assert [its.spec.refill for its in planned] == [2, 0, 0, 0]


def test_a_resumed_job_draws_the_tasks_of_one_that_never_stopped() -> None:
    through = numbering().groups(9, version=0, step=0)
    resumed = numbering(first_group=6).groups(3, version=0, step=0)
    assert resumed == through[18:]


def test_a_group_begun_with_a_task_that_is_gone_is_named() -> None:
    begun = IncompleteGroup(group="g000000", task="gone", ended=())
    with pytest.raises(TasksError, match="gone, but g000000 was begun with it; bring it back"):
        numbering(incomplete=(begun,)).groups(1, version=0, step=0)
