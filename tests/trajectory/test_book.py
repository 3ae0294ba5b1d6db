from __future__ import annotations

import pytest

from gyre.trajectory.book import Book, ExecutionError, group_number
from gyre.trajectory.messages import EvalScore, IncompleteGroup, StepReward
from gyre.trajectory.rows import GroupOutcome
from gyre.trajectory.tree import TreeError
from tests.trajectory.trees import record, result, spec

FIRST, SECOND = "g000000.00", "g000000.01"


def run(book: Book, execution: str, score: float | None, calls: int = 1) -> bool:
    """A whole execution; answers whether its group is complete."""
    its = spec(execution)
    book.open(its)
    for number in range(calls):
        book.record(record(f"c{number}", execution=execution))
    assert book.close(book.end(its, result(execution, score)))
    return book.group(its.group).complete


def outcome(group: str, step: int, *scores: float, version: int = 0) -> GroupOutcome:
    return GroupOutcome(
        group=group,
        split="eval" if group[0] == "e" else "train",
        step=step,
        version=version,
        scores={f"{group}.{index:02d}": score for index, score in enumerate(scores)},
    )


def test_a_group_is_complete_when_its_last_execution_ended() -> None:
    book = Book()
    assert run(book, FIRST, 1.0) is False
    assert run(book, SECOND, 0.0) is True
    group = book.group("g000000")
    assert group.scores == {FIRST: 1.0, SECOND: 0.0}
    assert [len(scored.tree.nodes) for scored in group.scored.values()] == [1, 1]


def test_a_dropped_execution_completes_its_group_but_is_not_in_it() -> None:
    book = Book()
    run(book, FIRST, 1.0)
    assert run(book, SECOND, None)
    assert book.group("g000000").scores == {FIRST: 1.0}
    assert list(book.group("g000000").scored) == [FIRST]
    assert book.totals().dropped == 1


def test_an_end_is_counted_once_however_often_it_is_said() -> None:
    book = Book()
    run(book, FIRST, 1.0)
    again = book.end(spec(), result(FIRST, 1.0))
    assert book.close(again) is False
    assert book.totals().executions == 1


def test_an_end_said_again_before_it_is_durable_keeps_its_counts() -> None:
    book = Book()
    book.open(spec())
    book.record(record("a"))
    first, second = (book.end(spec(), result(FIRST, 1.0)) for _ in range(2))
    assert first == second
    assert first.counts.calls == 1
    assert [book.close(first), book.close(second)] == [True, False]


def test_a_new_attempt_forgets_the_calls_of_the_earlier_one() -> None:
    book = Book()
    book.open(spec())
    book.record(record("a"))
    book.retried(FIRST)
    book.open(spec(attempt=2))
    book.record(record("b"))
    counts = book.end(spec(attempt=2), result(FIRST, 1.0)).counts
    assert (counts.calls, counts.retries) == (1, 0)


def test_an_execution_that_never_started_ends_without_a_tree() -> None:
    book = Book()
    ended = book.end(spec(), result(FIRST, 0.0, "never_started"))
    assert ended.counts.calls == 0
    assert book.close(ended)
    assert book.group("g000000").scores == {FIRST: 0.0}


def test_a_call_of_an_execution_that_is_not_open_is_refused() -> None:
    book = Book()
    with pytest.raises(ExecutionError, match=r"execution g000000\.00: it is not open, call a comes too late"):
        book.record(record("a"))
    book.open(spec())
    book.end(spec(), result(FIRST, 1.0))
    with pytest.raises(ExecutionError, match="too late"):
        book.record(record("a"))
    assert book.retried(FIRST) is False


def test_a_bad_record_leaves_the_execution_as_it_was() -> None:
    book = Book()
    book.open(spec())
    with pytest.raises(TreeError):
        book.record(record("b", "unknown"))
    assert book.end(spec(), result(FIRST, 1.0)).counts.calls == 0


def test_an_ended_execution_is_not_opened_again() -> None:
    book = Book()
    run(book, FIRST, 1.0)
    with pytest.raises(ExecutionError, match="cannot be opened again"):
        book.open(spec())


def test_a_complete_group_takes_no_further_execution() -> None:
    book = Book()
    run(book, FIRST, 1.0)
    run(book, SECOND, 1.0)
    with pytest.raises(ExecutionError, match=r"g000000 is complete without it"):
        book.end(spec("g000000.02"), result("g000000.02", 1.0))


def test_a_group_without_a_size_is_refused() -> None:
    with pytest.raises(ExecutionError, match="has no executions"):
        Book().open(spec(group_executions=0))


@pytest.mark.parametrize("group", ["", "x000001", "g", "g1x", "g-1"])
def test_a_group_id_that_has_no_number_is_refused(group: str) -> None:
    with pytest.raises(ValueError, match="expected g or e and digits"):
        group_number(group)


def test_finishing_a_group_lets_go_of_its_trees() -> None:
    book = Book()
    run(book, FIRST, 1.0)
    run(book, SECOND, 0.0)
    book.finish(outcome("g000000", 0, 1.0, 0.0))
    assert book.group("g000000").scored == {}


def test_totals_add_executions_and_list_rewards_and_evaluations_in_order() -> None:
    book = Book()
    run(book, FIRST, 1.0, calls=2)
    run(book, SECOND, None, calls=3)
    book.finish(outcome("g000003", 1, 0.5))
    book.finish(outcome("g000000", 0, 1.0))
    book.finish(outcome("g000001", 0, 0.0, 0.5))
    book.finish(outcome("e000001", 4, 0.75, version=4))
    book.finish(outcome("e000000", 0, 0.0, 0.5))
    book.finish(outcome("e000002", 5))
    totals = book.totals()
    assert (totals.executions, totals.dropped, totals.calls, totals.sampled_tokens) == (2, 1, 5, 5)
    assert totals.rewards == (
        StepReward(step=0, mean=0.5, executions=3),
        StepReward(step=1, mean=0.5, executions=1),
    )
    assert totals.evals == (
        EvalScore(step=0, version=0, score=0.25, executions=2),
        EvalScore(step=4, version=4, score=0.75, executions=1),
    )


def test_the_resume_state_names_what_is_missing() -> None:
    book = Book()
    run(book, FIRST, 1.0)
    run(book, SECOND, 1.0)
    run(book, "g000002.01", 0.0)
    book.open(spec("g000002.00"))
    book.open(spec("g000002.00", attempt=2, refill=1))
    book.open(spec("e000001.00"))
    state = book.resume_state()
    assert state.finished == ("g000000",)
    begun = IncompleteGroup(group="g000002", task="task-0", ended=("g000002.01",), refills={"g000002.00": 1})
    assert state.incomplete == (begun,)
    assert (state.next_group, state.next_eval) == (3, 2)


def test_a_new_run_begins_with_number_zero() -> None:
    state = Book().resume_state()
    assert (state.finished, state.incomplete, state.next_group, state.next_eval) == ((), (), 0, 0)
