"""From the journal back to what the TrajectoryActor knew."""

from __future__ import annotations

from gyre.trajectory.book import Book, Group, group_number
from gyre.trajectory.reader import ExecutionRow, JournalReader


def load(reader: JournalReader, first_step: int, groups_per_step: int) -> tuple[Book, list[Group]]:
    """The book, and the groups in it that are complete and to be planned (again).

    Of steps before `first_step` and of complete evaluations only the sums are kept. Executions that had not
    ended are open again with the calls they had; an attempt that begins anew forgets these.
    """
    book = Book()
    done = set()
    for outcome in reader.groups():
        if outcome.split == "eval" or outcome.step < first_step:
            book.finish(outcome)
            done.add(outcome.group)
    begun = {}
    for row in reader.executions():
        group = row.spec.group
        is_past = row.spec.split == "train" and group_number(group) // groups_per_step < first_step
        if group in done or is_past:
            book.saw(group)
            if row.ended:
                book.add_to_totals(row.ended)
        else:
            restore(book, reader, row)
            begun[group] = book.group(group)
    return book, [group for group in begun.values() if group.complete]


def restore(book: Book, reader: JournalReader, row: ExecutionRow) -> None:
    """One execution with its calls, ended where it has."""
    execution = row.spec.execution
    book.open(row.spec)
    book.forgot(row.spec.group, reader.earlier_tokens(execution))
    for record in reader.calls(execution):
        book.record(record)
    book.lost(execution, reader.undelivered(execution))
    book.retried(execution, reader.retries(execution))
    if row.ended:
        book.close(book.end(row.spec, row.ended.result))
