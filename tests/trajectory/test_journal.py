from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from gyre.cell.messages import Manifest, StepCommitted
from gyre.loss.microstep import MicroStepStats
from gyre.trajectory.journal import Journal, JournalClosed, JournalCorrupt, JournalError, JournalInUse
from gyre.trajectory.reader import JournalReader
from gyre.trajectory.records import CallRetried
from gyre.trajectory.roles import ExecutionCounts
from gyre.trajectory.rows import EndedExecution, GroupOutcome, RewindSteps, StepMember
from tests.trajectory.trees import record, result, spec

WRITER = Path(__file__).with_name("journal_writer.py")
ROOT = Path(__file__).parents[2]


def member(step: int, group: str) -> StepMember:
    return StepMember(step=step, group=group, executions=2, micro_steps=(f"{step}.{group}.0",))


def manifest(step: int, cell: int) -> Manifest:
    return Manifest(
        step=step,
        cell=cell,
        incarnation=1,
        version=step,
        micro_steps=(f"{step}.g000000.0",),
        tokens=(1,),
        checksums=(2,),
        stats=MicroStepStats(micro_steps=1),
    )


def committed(step: int) -> StepCommitted:
    return StepCommitted(
        step=step,
        version=step + 1,
        grad_norm=1.0,
        lr=0.1,
        seconds=2.0,
        stats=MicroStepStats(),
        cells=(0, 1),
        micro_steps_by_cell={0: 2, 1: 1},
    )


async def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    ended = EndedExecution(spec=spec(), result=result("g000000.00", 0.5), counts=ExecutionCounts(calls=1))
    outcome = GroupOutcome(group="g000000", split="train", step=0, version=0, scores={"g000000.00": 0.5})
    async with Journal(path) as journal:
        await journal.write(spec(), spec("g000000.01"))
        await journal.write(record("a"), record("b", "a"), CallRetried(execution="g000000.00", call="a"))
        await journal.write(ended, outcome, member(0, "g000000"), manifest(0, 0), committed(0))
        with JournalReader(path) as reader:
            assert [(row.spec, row.ended) for row in reader.executions()] == [
                (spec(), ended),
                (spec("g000000.01"), None),
            ]
            assert reader.executions("g000001") == []
            assert reader.calls("g000000.00") == [record("a"), record("b", "a")]
            assert reader.retries("g000000.00") == 1
            assert reader.groups() == [outcome]
            assert reader.step_members() == reader.step_members(0) == [member(0, "g000000")]
            assert reader.contributions(0) == [manifest(0, 0)]
            assert reader.contributions(1) == []
            assert reader.steps() == [committed(0)]


async def test_a_new_attempt_hides_the_calls_of_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with Journal(path) as journal:
        await journal.write(spec())
        await journal.write(record("a"), CallRetried(execution="g000000.00", call="a"))
        await journal.write(spec())  # Even under the same number: a resumed job counts anew.
        await journal.write(record("a", out=[9]))
        with JournalReader(path) as reader:
            assert reader.calls("g000000.00") == [record("a", out=[9])]
            assert reader.retries("g000000.00") == 0
            assert len(reader.calls("g000000.00", earlier_attempts=True)) == 2


async def test_the_same_call_twice_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with Journal(path) as journal:
        await journal.write(spec())
        await asyncio.gather(journal.write(record("a")), journal.write(record("a")))
        with JournalReader(path) as reader:
            assert len(reader.calls("g000000.00")) == 1


async def test_rewinding_forgets_steps_from_there_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with Journal(path) as journal:
        for step in range(3):
            await journal.write(member(step, f"g{step:06d}"), manifest(step, 0), committed(step))
        await journal.write(RewindSteps(step=1))
        with JournalReader(path) as reader:
            assert [row.step for row in reader.steps()] == [0]
            assert [row.step for row in reader.step_members()] == [0]
            assert [len(reader.contributions(step)) for step in range(3)] == [1, 0, 0]


async def test_writes_that_wait_share_a_transaction(tmp_path: Path) -> None:
    async with Journal(tmp_path / "journal.db") as journal:
        await journal.write(spec())
        executed: list[str] = []
        journal._connection.set_trace_callback(executed.append)
        await asyncio.gather(*(journal.write(record(f"c{index}")) for index in range(500)))
        assert sum("INSERT INTO calls" in sql for sql in executed) == 500
        assert executed.count("COMMIT") < 50


async def test_a_bad_entry_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with Journal(path) as journal:
        await journal.write(spec())
        stray = record("x", execution="g000009.00")
        answers = await asyncio.gather(
            journal.write(record("a")),
            journal.write(stray),
            journal.write(record("b")),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [type(None), sqlite3.IntegrityError, type(None)]
        with JournalReader(path) as reader:
            assert [call.call for call in reader.calls("g000000.00")] == ["a", "b"]


async def test_closing_commits_what_is_queued(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path)
    await journal.write(spec())
    pending = [asyncio.ensure_future(journal.write(record(f"c{index}"))) for index in range(50)]
    await asyncio.sleep(0)
    await journal.close()
    await asyncio.gather(*pending)
    with JournalReader(path) as reader:
        assert len(reader.calls("g000000.00")) == 50
    with pytest.raises(JournalClosed, match=r"journal\.db"):
        await journal.write(record("late"))
    await journal.close()


async def test_a_writer_that_is_cancelled_harms_no_other(tmp_path: Path) -> None:
    async with Journal(tmp_path / "journal.db") as journal:
        await journal.write(spec())
        cancelled = asyncio.ensure_future(journal.write(record("a")))
        other = asyncio.ensure_future(journal.write(record("b")))
        await asyncio.sleep(0)
        cancelled.cancel()
        await other


async def test_a_run_folder_belongs_to_one_job(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with Journal(path):
        with pytest.raises(JournalInUse, match=rf"journal\.db: in use by process {os.getpid()}"):
            Journal(path)
    async with Journal(path):
        pass


def damage_header(path: Path) -> None:
    path.write_bytes(b"this is no database" * 100)


def damage_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096 * 2 : 4096 * 6] = os.urandom(4096 * 4)
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def drop_tables(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript("DROP TABLE meta")
    connection.close()


@pytest.mark.parametrize("damage", [damage_header, damage_pages, cut, drop_tables])
async def test_a_corrupt_journal_is_an_error_that_names_the_file(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "journal.db"
    async with Journal(path) as journal:
        await journal.write(spec(), *(record(f"c{index}", out=[3] * 500) for index in range(50)))
    damage(path)  # type: ignore[operator]
    with pytest.raises(JournalCorrupt, match=r"journal\.db: .*corrupt .*restore the file from a copy"):
        Journal(path)


@pytest.mark.parametrize(("table", "column"), [("calls", "record"), ("executions", "spec")])
@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x80"])
async def test_content_that_is_damaged_is_an_error_that_names_the_file(
    tmp_path: Path, table: str, column: str, content: bytes
) -> None:
    """SQLite has no checksums: its own check passes."""
    path = tmp_path / "journal.db"
    async with Journal(path) as journal:
        await journal.write(spec(), record("c0"))
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE {table} SET {column} = ?", (content,))
    connection.commit()
    connection.close()
    with JournalReader(path) as reader, pytest.raises(JournalCorrupt, match=r"journal\.db: .*corrupt"):
        reader.executions()
        reader.calls(spec().execution)


async def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    await Journal(path).close()
    connection = sqlite3.connect(path)
    connection.executescript("UPDATE meta SET value = '99'")
    connection.close()
    with pytest.raises(JournalCorrupt, match="its version is 99"):
        Journal(path)
    with pytest.raises(JournalCorrupt, match="its version is 99"):
        JournalReader(path)


def test_a_missing_journal_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"journal\.db: there is no journal"):
        JournalReader(tmp_path / "journal.db")
    with pytest.raises(JournalError, match=r"no/journal\.db: cannot be opened"):
        Journal(tmp_path / "no" / "journal.db")


def start_writer(*arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The writer prints the id of each call when it is acknowledged."""
    return subprocess.Popen(
        [*prefix, sys.executable, str(WRITER), *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_every_acknowledged_write_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    writer = start_writer("endless", str(path))
    assert writer.stdout is not None
    acknowledged = [writer.stdout.readline().strip() for _ in range(2000)]
    writer.send_signal(signal.SIGKILL)
    acknowledged += writer.stdout.read().split()
    writer.wait()
    with JournalReader(path) as reader:
        written = {call.call for call in reader.calls("g000000.00")}
    assert set(acknowledged) <= written
    assert len(acknowledged) >= 2000


FULL_DISKS = {
    "file size limit": ("limit", ()),
    "tmpfs": ("ballast", ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m t "$0" && exec "$@"')),
}


@pytest.mark.parametrize("disk", FULL_DISKS)
def test_a_full_disk_makes_writes_wait_and_loses_none(tmp_path: Path, disk: str) -> None:
    mode, prefix = FULL_DISKS[disk]
    if prefix:
        probe = subprocess.run([*prefix, str(tmp_path), "true"], capture_output=True, check=False)
        if probe.returncode:
            pytest.skip("this user cannot mount a tmpfs")
        prefix = (*prefix, str(tmp_path))
    writer = start_writer(mode, str(tmp_path / "journal.db"), prefix=prefix)
    output, _ = writer.communicate(timeout=50)
    assert writer.returncode == 0
    assert output.split() == ["journal_full", "waiting", "journal_recovered", "complete"]


async def test_closing_gives_up_on_a_disk_that_stays_full(tmp_path: Path) -> None:
    events: asyncio.Queue[str] = asyncio.Queue()
    structlog.configure(processors=[lambda _, __, fields: events.put_nowait(fields["event"]) or ""])
    journal = Journal(tmp_path / "journal.db")
    await journal.write(spec())
    # A database that has its largest size is what a full disk looks like to SQLite.
    used = journal._connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count = {used}")
    waiting = asyncio.ensure_future(journal.write(record("a", out=[3] * 100_000)))
    assert await events.get() == "journal_full"
    await journal.close()
    with pytest.raises(JournalClosed, match="disk refused to write"):
        await waiting
