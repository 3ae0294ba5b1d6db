"""Reading a journal: for going on with a run, and for people who look at one. Never blocks its writer."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from gyre.cell.messages import Manifest, StepCommitted
from gyre.trajectory.journal import JournalError, check_version, corrupt
from gyre.trajectory.records import CallRecord, ExecutionSpec
from gyre.trajectory.rows import EndedExecution, GroupOutcome, StepMember, decode_call

T = TypeVar("T")


class ExecutionRow(msgspec.Struct, frozen=True, kw_only=True):
    """An execution as journalled: `ended` is None while it runs (or was cut short)."""

    spec: ExecutionSpec
    ended: EndedExecution | None

    @property
    def execution(self) -> str:
        return self.spec.execution


class DamagedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is journalled of an execution cannot be read."""

    execution: str
    reason: str


# What decoding a damaged entry may raise.
_DAMAGED = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)


class JournalReader:
    """A read-only view of the journal at `path`, as of each question. Raises JournalError when the file
    is not there, JournalCorrupt when it is damaged."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise JournalError(path, "there is no journal: the run has not begun, or this is no run folder")
        self.path = path
        try:
            self._connection = sqlite3.connect(_uri(path), uri=True, timeout=5.0)
        except sqlite3.Error as error:
            raise corrupt(path, str(error)) from error
        try:
            check_version(self._connection, path)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, sqlite3.Error):
                raise corrupt(path, str(error)) from error
            raise

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def executions(self, group: str | None = None) -> list[ExecutionRow]:
        """In order of execution id, of one group or all."""
        return [self._whole(row) for row in self.scan(group)]

    def scan(self, group: str | None = None) -> Iterator[ExecutionRow | DamagedRow]:
        """As `executions`, one after the other; where a row is damaged it goes on with the next."""
        if group is None:
            return self._scan("ORDER BY execution")
        return self._scan("WHERE group_id = ? ORDER BY execution", group)

    def execution(self, execution: str) -> ExecutionRow | None:
        """None where there is none of that name."""
        row = next(self._scan("WHERE execution = ?", execution), None)
        return None if row is None else self._whole(row)

    def _scan(self, which: str, *parameters: object) -> Iterator[ExecutionRow | DamagedRow]:
        rows = self._rows(f"SELECT execution, spec, ended FROM executions {which}", *parameters)
        for execution, spec, ended in rows:
            try:
                yield ExecutionRow(
                    spec=_decode(spec, ExecutionSpec),
                    ended=None if ended is None else _decode(ended, EndedExecution),
                )
            except _DAMAGED as error:
                yield DamagedRow(execution=str(execution), reason=str(error))

    def _whole(self, row: ExecutionRow | DamagedRow) -> ExecutionRow:
        if isinstance(row, DamagedRow):
            raise corrupt(self.path, f"execution {row.execution}: {row.reason}")
        return row

    def calls(self, execution: str, *, earlier_attempts: bool = False) -> list[CallRecord]:
        """The calls of an execution's last attempt (or of all) in the order they were recorded."""
        return self._calls(execution, "true" if earlier_attempts else "c.opening = e.opening")

    def earlier_tokens(self, execution: str) -> int:
        """Sampled by attempts that were begun anew."""
        calls = self._calls(execution, "c.opening < e.opening")
        lost = self._undelivered(execution, "u.opening < e.opening")
        return sum(len(call.output_ids) for call in calls) + sum(tokens for _, tokens in lost)

    def undelivered(self, execution: str) -> dict[str, int]:
        """Tokens of the last attempt that are in no record, by call."""
        return dict(self._undelivered(execution, "u.opening = e.opening"))

    def retries(self, execution: str) -> int:
        """How many of the last attempt's calls the harness repeated."""
        ((count,),) = self._rows(
            "SELECT count(*) FROM retries r JOIN executions e USING (execution)"
            " WHERE execution = ? AND r.opening = e.opening",
            execution,
        )
        return int(count)

    def groups(self) -> list[GroupOutcome]:
        """Groups that are complete, in order of group id."""
        rows = self._rows("SELECT outcome FROM groups ORDER BY group_id")
        return [self._decode(blob, GroupOutcome) for (blob,) in rows]

    def group(self, group: str) -> GroupOutcome | None:
        """None while it is not complete."""
        for (blob,) in self._rows("SELECT outcome FROM groups WHERE group_id = ?", group):
            return self._decode(blob, GroupOutcome)
        return None

    def step_members(self, step: int | None = None) -> list[StepMember]:
        """By step and group id, of one step or all."""
        where, parameters = ("WHERE step = ?", (step,)) if step is not None else ("", ())
        rows = self._rows(f"SELECT member FROM step_members {where} ORDER BY step, group_id", *parameters)
        return [self._decode(blob, StepMember) for (blob,) in rows]

    def contributions(self, step: int) -> list[Manifest]:
        """Accepted contributions of a step, in order."""
        rows = self._rows("SELECT manifest FROM contributions WHERE step = ? ORDER BY position", step)
        return [self._decode(blob, Manifest) for (blob,) in rows]

    def steps(self) -> list[StepCommitted]:
        """Committed steps in order."""
        rows = self._rows("SELECT committed FROM steps ORDER BY step")
        return [self._decode(blob, StepCommitted) for (blob,) in rows]

    def _calls(self, execution: str, which: str) -> list[CallRecord]:
        rows = self._rows(
            "SELECT record FROM calls c JOIN executions e USING (execution)"
            f" WHERE execution = ? AND {which} ORDER BY position",
            execution,
        )
        try:
            return [decode_call(blob) for (blob,) in rows]
        except _DAMAGED as error:
            raise corrupt(self.path, f"a call of {execution}: {error}") from error

    def _undelivered(self, execution: str, which: str) -> list[tuple[str, int]]:
        rows = self._rows(
            "SELECT call, tokens FROM undelivered u JOIN executions e USING (execution)"
            f" WHERE execution = ? AND {which} ORDER BY call",
            execution,
        )
        try:
            return [msgspec.convert(row, tuple[str, int]) for row in rows]
        except _DAMAGED as error:
            raise corrupt(self.path, f"what was not delivered of {execution}: {error}") from error

    def _decode(self, blob: bytes, kind: type[T]) -> T:
        try:
            return _decode(blob, kind)
        except _DAMAGED as error:
            raise corrupt(self.path, f"{kind.__name__}: {error}") from error

    def _rows(self, sql: str, *parameters: object) -> Iterator[tuple[bytes, ...]]:
        try:
            # `yield from` would close the cursor of who reads no further, which fails once this is closed.
            for row in self._connection.execute(sql, parameters):  # noqa: UP028
                yield row
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise corrupt(self.path, str(error)) from error


def _decode(blob: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(blob, type=kind)


def _uri(path: Path) -> str:
    # SQLite wants to make a file beside a journal in WAL mode; where it cannot, nobody else writes either.
    frozen = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    return f"{path.absolute().as_uri()}?{'immutable=1' if frozen else 'mode=ro'}"
