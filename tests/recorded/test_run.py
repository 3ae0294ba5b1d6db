from __future__ import annotations

import gc
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gyre.actors.looking import CONTACT, Contact
from gyre.actors.looking.contact import VERSION, write_contact
from gyre.recorded import ExecutionLine, RecordedRun, SpanLine, TrajectoryLine, lines
from gyre.recorded.rows import By, Line
from gyre.recorded.run import Recorded
from gyre.recorded.text import token_text
from gyre.trajectory import SamplingConfig
from gyre.trajectory.reader import DamagedRow
from gyre.trajectory.rows import EndedExecution, Entry, GroupOutcome, Undelivered, statements
from tests.recorded.folders import execution_of, group_of, groups, planned_as_the_job_does, tidy, write_run
from tests.trajectory.trees import spec


def never(row: DamagedRow) -> None:
    raise AssertionError(row)


def all_lines(folder: Path, by: By) -> list[Line]:
    with RecordedRun(folder) as run:
        return list(lines(run, by, None, never))


@settings(max_examples=15, deadline=None)
@given(entries=groups())
def test_what_is_shown_as_trained_is_what_the_job_plans_and_nothing_is_lost(entries: list[Entry]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), entries)
        spans = all_lines(Path(folder), "span")
        paths = all_lines(Path(folder), "trajectory")
    planned = planned_as_the_job_does("g000000", entries, SamplingConfig(max_trajectories=2))
    for entry in entries:
        if not isinstance(entry, EndedExecution):
            continue
        execution = entry.spec.execution
        its = [span for span in spans if isinstance(span, SpanLine) and span.execution == execution]
        assert sum(span.tokens for span in its if span.mask != "context") == entry.counts.sampled_tokens
        assert {span.mask for span in its} <= {"context", "trained", "excluded"}
        trained = {
            (t.leaf, t.trainable)
            for m in planned.micro_steps
            for t in m.trajectories
            if t.execution == execution
        }
        shown = {
            (path.leaf, np.array(path.trained, np.uint8).tobytes())
            for path in paths
            if isinstance(path, TrajectoryLine) and path.execution == execution and path.draw is not None
        }
        assert shown == trained
        of_spans = sum(span.tokens for span in its if span.mask == "trained")
        assert of_spans == sum(trainable.count(1) for _, trainable in trained)


def test_spans_give_back_each_token_of_each_call(tmp_path: Path) -> None:
    calls = tidy("g000000.00")
    write_run(tmp_path, group_of("g000000", [1.0, 0.0], [calls, []]))
    spans = [span for span in all_lines(tmp_path, "span") if isinstance(span, SpanLine)]
    for call in calls:
        its = [span for span in spans if span.call == call.call]
        token_ids = tuple(token for span in its for token in span.token_ids)
        assert token_ids == call.new_input_ids + call.output_ids
        assert [logprob for span in its for logprob in span.logprobs] == list(call.logprobs)
    assert [(s.node, s.parent, s.position, s.mask, s.version) for s in spans if s.call in "abd"] == [
        (0, None, 0, "context", None),
        (0, None, 2, "trained", 0),
        (1, None, 0, "context", None),
        (1, None, 1, "excluded", 0),
        (3, 0, 4, "context", None),
        (3, 0, 5, "trained", 1),
    ]
    assert {span.reason for span in spans if span.call == "b"} == {None, "not_drawn"}


def test_what_is_not_decided_yet_is_said_to_be_so(tmp_path: Path) -> None:
    done = execution_of("g000000.00", tidy("g000000.00"), 1.0, 2)
    begun = [spec("g000000.01"), *tidy("g000000.01")[:1]]
    write_run(tmp_path, [*done, *begun])
    with RecordedRun(tmp_path) as run:
        first, second = run.each()
        assert not isinstance(first, DamagedRow)
        assert not isinstance(second, DamagedRow)
        assert first.trained_tokens is None
        assert str(first.fates()["a"]) == "undecided"
        assert (second.counts.calls, second.row.ended) == (1, None)
        assert run.state == "stopped"


def test_of_a_dropped_execution_and_of_one_at_the_mean_nothing_is_trained(tmp_path: Path) -> None:
    calls = [tidy(f"g000000.{index:02d}") for index in range(4)]
    write_run(tmp_path, group_of("g000000", [None, 0.0, 0.5, 1.0], calls))
    with RecordedRun(tmp_path) as run:
        excluded = [found.ledger.excluded_tokens for found in run.each() if not isinstance(found, DamagedRow)]
    assert excluded[0] == {"dropped": 7}
    assert excluded[2] == {"zero_advantage": 7}
    assert [sum(one.values()) for one in excluded] == [7, 1, 7, 1]


def test_without_its_job_a_run_is_shown_without_what_was_trained(tmp_path: Path) -> None:
    write_run(tmp_path, group_of("g000000", [1.0, 0.0], [tidy("g000000.00"), tidy("g000000.01")]))
    (tmp_path / "job.toml").write_text("not = = TOML")
    with RecordedRun(tmp_path) as run:
        (note,) = run.notes
        assert "line 1, column 7" in note
        assert "nobody knows which tokens were trained" in note
        assert [line.mask for line in lines(run, "span", None, never) if isinstance(line, SpanLine)][
            1
        ] == "undecided"


def test_one_execution_is_read_without_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, group_of("g000000", [1.0, 0.0], [tidy("g000000.00"), tidy("g000000.01")]))
    with sqlite3.connect(tmp_path / "journal.db") as connection:
        connection.execute("UPDATE executions SET spec = x'00' WHERE execution = 'g000000.01'")
        connection.execute("UPDATE calls SET record = x'00' WHERE execution = 'g000000.01'")
    with RecordedRun(tmp_path) as run:
        row = run.reader.execution("g000000.00")
        assert row is not None
        assert run.recorded(row).trained_tokens == 6
        found = list(run.each())
    assert [isinstance(one, DamagedRow) for one in found] == [False, True]


def test_who_reads_no_further_may_end_after_the_run_is_closed(tmp_path: Path) -> None:
    """It was an error that nobody could catch, in whatever was running when it was collected."""
    folder = write_run(tmp_path, group_of("g000000", [1.0, 0.0], [tidy(f"g000000.0{n}") for n in range(2)]))
    with RecordedRun(folder) as run:
        rows = run.each()
        next(rows)
    del rows  # what it raises is made an error by pytest
    gc.collect()


def test_the_state_of_a_run_is_that_of_its_process(tmp_path: Path) -> None:
    write_run(tmp_path, group_of("g000000", [1.0, 0.0], [[], []]))
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    states = []
    for pid in (os.getpid(), int(dead.stdout)):
        contact = Contact(
            version=VERSION,
            name="root",
            host=socket.gethostname(),
            pid=pid,
            node_id="",
            endpoint="",
            token=b"",
        )
        write_contact(tmp_path / CONTACT, contact)
        with RecordedRun(tmp_path) as run:
            states.append(run.state)
    (tmp_path / CONTACT).unlink()
    (tmp_path / "summary.json").write_text("{}")
    with RecordedRun(tmp_path) as run:
        states.append(run.state)
    assert states == ["running", "killed", "finished"]


def test_a_run_is_read_while_its_job_writes(tmp_path: Path) -> None:
    calls = tidy("g000000.00")
    write_run(tmp_path, [])
    with closing(sqlite3.connect(tmp_path / "journal.db", isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        with RecordedRun(tmp_path) as run:
            seen = []
            for entry in (spec("g000000.00"), *calls):
                writer.execute("BEGIN IMMEDIATE")
                for sql, parameters in statements(entry):
                    writer.execute(sql, parameters)
                seen.append([len(one.tree.nodes) for one in run.each() if not isinstance(one, DamagedRow)])
                writer.execute("COMMIT")
    assert seen == [[], [0], [1], [2], [3]]


def test_a_folder_that_cannot_be_written_to_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, group_of("g000000", [1.0, 0.0], [tidy("g000000.00"), []]))
    with closing(sqlite3.connect(tmp_path / "journal.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda *_: False)
    with RecordedRun(tmp_path) as run:
        assert len(list(run.each())) == 2
        assert sorted(tmp_path.iterdir()) == before


def test_tokens_of_earlier_attempts_are_counted(tmp_path: Path) -> None:
    begun = [spec("g000000.00"), *tidy("g000000.00")[:2]]
    rest = group_of("g000000", [1.0, 0.0], [tidy("g000000.00"), []])
    write_run(tmp_path, [*begun, *rest])
    (first, _) = all_lines(tmp_path, "execution")
    assert isinstance(first, ExecutionLine)
    assert (first.sampled_tokens, first.trained_tokens) == (7, 6)
    assert first.excluded_tokens == {"not_drawn": 1, "earlier_attempt": 3}


def test_tokens_that_were_not_delivered_are_counted(tmp_path: Path) -> None:
    entries = group_of("g000000", [1.0, 0.0], [tidy("g000000.00"), []])
    write_run(tmp_path, [*entries, Undelivered(execution="g000000.00", tokens={"a": 2, "gone": 3})])
    with RecordedRun(tmp_path) as run:
        (first, _) = run.each()
    assert isinstance(first, Recorded)
    assert first.excluded_tokens == {"not_drawn": 1, "undelivered": 5}
    assert str(first.fates()["a"]).startswith("draw")


def test_an_execution_that_its_group_knows_nothing_of_is_damaged(tmp_path: Path) -> None:
    entries = group_of("g000000", [1.0, 0.0, 0.5], [tidy(f"g000000.{index:02d}") for index in range(3)])
    outcome = entries[-1]
    assert isinstance(outcome, GroupOutcome)
    without = {name: value for name, value in outcome.advantages.items() if name != "g000000.01"}
    write_run(tmp_path, [*entries[:-1], msgspec.structs.replace(outcome, advantages=without)])
    with RecordedRun(tmp_path) as run:
        damaged = [found for found in run.each() if isinstance(found, DamagedRow)]
    assert [(row.execution, row.reason) for row in damaged] == [
        ("g000000.01", "its group g000000 is complete and has no advantage for it")
    ]


def test_tokens_are_read_by_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    """By nothing else that lies there."""
    folder = tmp_path / "checkpoints"
    for name, word in {
        "step-000002": "older",
        "step-000010": "newest",
        "partial-000011": "begun",
        "step-000010.copy": "of somebody",
        "temporary": "of somebody",
    }.items():
        (folder / name).mkdir(parents=True)
        Tokenizer(WordLevel({word: 7}, unk_token=word)).save(str(folder / name / "tokenizer.json"))
    found = []
    for gone in ("nothing", "step-000010", "step-000002"):
        shutil.rmtree(folder / gone, ignore_errors=True)
        text = token_text(tmp_path, None)
        found.append(text and text.of(7))
    assert found == ["newest", "older", None]
