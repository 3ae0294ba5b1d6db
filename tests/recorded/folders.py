"""Run folders as a job leaves them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gyre.trajectory import SamplingConfig
from gyre.trajectory.book import Book
from gyre.trajectory.pack import PlannedGroup, plan_group
from gyre.trajectory.records import CallRecord, CallRetried, ExecutionSpec
from gyre.trajectory.rows import SCHEMA, SCHEMA_VERSION, EndedExecution, Entry, GroupOutcome, statements
from tests.trajectory.trees import calls_tool, random_records, record, result, says, spec, user

MICRO_STEP_TOKENS = 64

JOB = f"""
name = "small"
run_dir = "elsewhere"
[model]
path = "/nowhere/model"
[train]
groups_per_step = 1
micro_step_tokens = {MICRO_STEP_TOKENS}
[sampling]
max_trajectories = 2
"""


def execution_of(
    execution: str, records: Iterable[CallRecord], score: float | None, group_executions: int
) -> list[Entry]:
    """What is journalled of an execution that ends, one of whose calls is repeated."""
    book, its = Book(), spec(execution, group_executions=group_executions)
    book.open(its)
    entries: list[Entry] = [its]
    for call in records:
        book.record(call)
        entries.append(call)
    if len(entries) > 1:
        book.retried(execution)
        entries.append(CallRetried(execution=execution, call=call.call))
    return [*entries, book.end(its, result(execution, score))]


def group_of(group: str, scores: Sequence[float | None], records: Sequence[list[CallRecord]]) -> list[Entry]:
    """All of a group that is complete."""
    entries: list[Entry] = []
    for index, (score, calls) in enumerate(zip(scores, records, strict=True)):
        entries += execution_of(f"{group}.{index:02d}", calls, score, len(scores))
    return [*entries, outcome_of(group, entries)]


def outcome_of(group: str, entries: Sequence[Entry]) -> GroupOutcome:
    planned = planned_as_the_job_does(group, entries, SamplingConfig(max_trajectories=2))
    ended = [entry for entry in entries if isinstance(entry, EndedExecution)]
    scores = {entry.spec.execution: entry.result.score for entry in ended if entry.result.score is not None}
    return GroupOutcome(
        group=group,
        split="train",
        step=planned.step,
        version=0,
        scores=scores,
        advantages=planned.advantages,
        discarded=planned.discarded,
    )


def planned_as_the_job_does(group: str, entries: Sequence[Entry], sampling: SamplingConfig) -> PlannedGroup:
    book = Book()
    for entry in entries:
        if isinstance(entry, ExecutionSpec):
            book.open(entry)
        elif isinstance(entry, CallRecord):
            book.record(entry)
        elif isinstance(entry, EndedExecution):
            book.close(book.end(entry.spec, entry.result))
    scored = book.group(group).scored.values()
    return plan_group(group, int(group[1:]), scored, sampling, MICRO_STEP_TOKENS)


def write_journal(path: Path, entries: Iterable[Entry]) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(SCHEMA)
    connection.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
    for entry in entries:
        for sql, parameters in statements(entry):
            connection.execute(sql, parameters)
    connection.commit()
    connection.close()


def write_run(folder: Path, entries: Iterable[Entry]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.toml").write_text(JOB)
    (folder / "journal.db").unlink(missing_ok=True)
    write_journal(folder / "journal.db", entries)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Token 7 says `t7`."""
    checkpoint = folder / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    Tokenizer(WordLevel({f"t{token}": token for token in range(30)}, unk_token="t0")).save(
        str(checkpoint / "tokenizer.json")
    )


def tidy(execution: str) -> list[CallRecord]:
    """A main agent with a sub-agent, and a fork of its context."""
    return [
        record(
            "a",
            execution=execution,
            new=[1, 2],
            out=[10, 11],
            output=calls_tool("ask", prompt="file the box"),
        ),
        record(
            "b", execution=execution, new=[3], out=[12], messages=[user("file the box")], output=says("done")
        ),
        record("c", "a", execution=execution, new=[4], out=[13, 14, 15], output=says("all is done")),
        record("d", "a", execution=execution, new=[5], out=[16], output=says("\x1b[2Jno"), version=1),
    ]


@st.composite
def groups(draw: st.DrawFn, group: str = "g000000") -> list[Entry]:
    count = draw(st.integers(2, 3))
    scores = draw(st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=count, max_size=count))
    records = [draw(random_records(f"{group}.{index:02d}", max_calls=6)) for index in range(count)]
    return group_of(group, scores, records)
