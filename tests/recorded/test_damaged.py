"""Journals that were cut off, or that a disk has spoilt: what can be read is, the rest is told."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.recorded import RecordedRun, lines
from gyre.recorded.resample import resample
from gyre.recorded.show import ways
from gyre.recorded.wal import torn_bytes
from gyre.trajectory.journal import JournalError
from gyre.trajectory.reader import DamagedRow
from gyre.trajectory.records import CallRecord
from gyre.trajectory.rows import SCHEMA, SCHEMA_VERSION, Entry, statements
from tests.recorded.folders import JOB, group_of, tidy, write_run

EXECUTIONS = 4


def entries() -> list[Entry]:
    calls = [tidy(f"g000000.{index:02d}") for index in range(EXECUTIONS)]
    return group_of("g000000", [1.0, 0.0, 0.5, None], calls)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole"), entries())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a job that was killed: all that it wrote, a transaction for each entry, is in the log."""
    live, dead = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp("dead")
    connection = sqlite3.connect(live / "journal.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    version = f"INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}');"
    connection.executescript(f"BEGIN;{SCHEMA}{version}COMMIT;")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for entry in entries():
        for sql, parameters in statements(entry):
            connection.execute(sql, parameters)
    for name in ("journal.db", "journal.db-wal"):
        shutil.copy(live / name, dead / name)
    connection.close()
    (dead / "job.toml").write_text(JOB)
    return dead


def read_all(folder: Path) -> tuple[int, int]:
    """How many executions could be read and how many things could not."""
    told: list[object] = []
    with RecordedRun(folder) as run:
        read = {line.execution for line in lines(run, "span", None, told.append)}
        was, would_be = ways(folder, ["sampling.draw=all"])
        for _ in resample(run, was, would_be, lambda *what: told.append(what)):
            pass
    return len(read), len(told)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_spoilt_journal_is_read_as_far_as_it_goes(whole: Path, data: st.DataObject) -> None:
    content = bytearray((whole / "journal.db").read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=12)):
        content[at] = data.draw(st.integers(0, 255))
    length = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(JOB)
        (Path(folder) / "journal.db").write_bytes(content[:length])
        try:
            read_all(Path(folder))
        except JournalError as error:
            assert str(Path(folder) / "journal.db") in str(error)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_record_of_any_bytes_is_one_damaged_execution(whole: Path, data: st.DataObject) -> None:
    column = data.draw(st.sampled_from(["calls.record", "executions.spec", "executions.ended"]))
    table, _, name = column.partition(".")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        with sqlite3.connect(Path(folder) / "journal.db") as connection:
            its = "WHERE execution = 'g000000.01'"
            (kept,) = connection.execute(f"SELECT {name} FROM {table} {its}").fetchone()
            at = data.draw(st.integers(0, len(kept) - 1))
            changed = kept[:at] + b"\xff" + kept[at + 1 :]
            spoilt = data.draw(st.sampled_from([kept[:at], changed, b"\xc0", 5, "x"]))
            connection.execute(f"UPDATE {table} SET {name} = ? {its}", (spoilt,))
        connection.close()
        with RecordedRun(Path(folder)) as run:
            found = list(run.each())
    assert len(found) == EXECUTIONS
    assert all(not isinstance(one, DamagedRow) for one in (found[0], *found[2:]))
    if isinstance(found[1], DamagedRow):
        assert found[1].execution == "g000000.01"


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_write_that_was_cut_short_is_told_and_all_before_it_is_read(
    killed: Path, data: st.DataObject
) -> None:
    log = (killed / "journal.db-wal").read_bytes()
    length = data.draw(st.integers(0, len(log)))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(killed, folder, dirs_exist_ok=True)
        (Path(folder) / "journal.db-wal").write_bytes(log[:length])
        torn = torn_bytes(Path(folder) / "journal.db-wal")
        read, told = read_all(Path(folder))
        with RecordedRun(Path(folder)) as run:
            assert bool(run.notes) == bool(torn)
    ends = [end for end in _transactions(log) if end <= length]
    assert torn == length - ends[-1] if ends else torn == length
    acknowledged = entries()[: max(0, len(ends) - 1)]
    expected = {entry.execution for entry in acknowledged if isinstance(entry, CallRecord)}
    assert (read, told) == (len(expected), 0)


def _transactions(log: bytes) -> list[int]:
    """Where the log's header and each transaction end."""
    page = int.from_bytes(log[8:12], "big")
    frames = range(32, len(log), 24 + page)
    return [32, *(at + 24 + page for at in frames if int.from_bytes(log[at + 4 : at + 8], "big"))]
