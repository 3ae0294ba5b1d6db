from __future__ import annotations

from pathlib import Path

from gyre.trajectory.book import Book
from gyre.trajectory.journal import Journal
from gyre.trajectory.ledger import Ledger
from gyre.trajectory.reader import JournalReader
from gyre.trajectory.records import UNFINISHED, CallRetried
from gyre.trajectory.resume import load
from gyre.trajectory.rows import GroupOutcome, Undelivered
from tests.trajectory.trees import record, result, spec


async def live(
    journal: Journal, book: Book, execution: str, score: float | None, *, ends: bool = True
) -> None:
    """What an actor does with an execution of two calls, one of them retried."""
    its = spec(execution)
    book.open(its)
    await journal.write(its)
    for call in (record("a", execution=execution), record("b", "a", out=[4, 5], execution=execution)):
        book.record(call)
        await journal.write(call)
    book.retried(execution)
    await journal.write(CallRetried(execution=execution, call="b"))
    if ends:
        ended = book.end(its, result(execution, score))
        await journal.write(ended)
        book.close(ended)


async def finish(journal: Journal, book: Book, group: str, step: int) -> None:
    found = book.group(group)
    outcome = GroupOutcome(
        group=group, split=found.first.split, step=step, version=0, scores=found.scores, advantages={}
    )
    await journal.write(outcome)
    book.finish(outcome)


async def test_what_was_journalled_comes_back(tmp_path: Path) -> None:
    path, before = tmp_path / "journal.db", Book()
    async with Journal(path) as journal:
        for execution, score in {"g000000.00": 1.0, "g000000.01": 0.0, "g000001.00": None}.items():
            await live(journal, before, execution, score)
        await live(journal, before, "g000001.01", None, ends=False)
    with JournalReader(path) as reader:
        after, complete = load(reader, first_step=0, groups_per_step=2)
    assert after.totals() == before.totals()
    assert after.resume_state() == before.resume_state()
    assert [group.id for group in complete] == ["g000000"]
    trees = [scored.tree for scored in complete[0].scored.values()]
    assert [tree.path_tokens(tree.nodes[-1]).token_ids.tolist() for tree in trees] == [
        [1, 2, 3, 1, 2, 4, 5]
    ] * 2


async def test_an_open_execution_goes_on_with_the_calls_it_had(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with Journal(path) as journal:
        await live(journal, Book(), "g000000.00", None, ends=False)
    with JournalReader(path) as reader:
        book, _ = load(reader, first_step=0, groups_per_step=1)
    book.record(record("c", "b"))
    counts = book.end(spec(), result("g000000.00", 1.0)).counts
    assert (counts.calls, counts.retries) == (3, 1)


async def test_what_an_attempt_sampled_that_was_begun_anew_is_still_listed(tmp_path: Path) -> None:
    path, before = tmp_path / "journal.db", Book()
    async with Journal(path) as journal:
        await live(journal, before, "g000000.00", None, ends=False)
        await live(journal, before, "g000000.00", 1.0)
    with JournalReader(path) as reader:
        after, _ = load(reader, first_step=0, groups_per_step=1)
    for book in (before, after):
        assert book.group("g000000").excluded_tokens(Ledger()) == {"earlier_attempt": 3}


async def test_what_nobody_was_answered_is_still_listed(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    lost = record("c", "b", out=[6] * 4, finish_reason=UNFINISHED)
    async with Journal(path) as journal:
        for _ in range(2):
            await live(journal, Book(), "g000000.00", None, ends=False)
            await journal.write(lost)
    with JournalReader(path) as reader:
        book, _ = load(reader, first_step=0, groups_per_step=1)
    ended = book.end(spec(), result("g000000.00", 1.0))
    book.close(ended)
    assert (ended.counts.sampled_tokens, ended.counts.calls) == (7, 2)
    assert book.group("g000000").excluded_tokens(Ledger()) == {"earlier_attempt": 7}


async def test_what_was_not_delivered_is_still_listed(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    lost = Undelivered(execution="g000000.00", tokens={"b": 2, "gone": 3})
    async with Journal(path) as journal:
        for _ in range(2):
            await live(journal, Book(), "g000000.00", None, ends=False)
            for _ in range(2):
                await journal.write(lost)
    with JournalReader(path) as reader:
        book, _ = load(reader, first_step=0, groups_per_step=1)
    ended = book.end(spec(), result("g000000.00", 1.0))
    book.close(ended)
    assert (ended.counts.sampled_tokens, ended.counts.calls) == (8, 2)
    assert book.group("g000000").excluded_tokens(Ledger()) == {"earlier_attempt": 8}
    (scored,) = book.group("g000000").scored.values()
    assert scored.tree.undelivered == {"b": 2, "gone": 3}


async def test_of_trained_steps_only_sums_are_kept(tmp_path: Path) -> None:
    path, before = tmp_path / "journal.db", Book()
    async with Journal(path) as journal:
        for execution in ("g000000.00", "g000000.01", "g000001.00", "g000001.01"):
            await live(journal, before, execution, 1.0)
        await finish(journal, before, "g000000", 0)
        await finish(journal, before, "g000001", 1)
    with JournalReader(path) as reader:
        book, complete = load(reader, first_step=1, groups_per_step=1)
    assert [group.id for group in complete] == ["g000001"]
    state = book.resume_state()
    assert (state.finished, state.incomplete, state.next_group) == (("g000001",), (), 2)
    totals = book.totals()
    assert (totals.executions, totals.calls, totals.retries) == (4, 8, 4)
    # The rewards of group 1 come back when it is planned again.
    assert [reward.step for reward in totals.rewards] == [0]


async def test_a_complete_evaluation_is_not_run_again(tmp_path: Path) -> None:
    path, before = tmp_path / "journal.db", Book()
    async with Journal(path) as journal:
        for execution in ("e000000.00", "e000000.01"):
            await live(journal, before, execution, 0.5)
        await finish(journal, before, "e000000", 0)
    with JournalReader(path) as reader:
        book, complete = load(reader, first_step=0, groups_per_step=1)
    assert complete == []
    assert [score.score for score in book.totals().evals] == [0.5]
    assert book.resume_state().next_eval == 1
