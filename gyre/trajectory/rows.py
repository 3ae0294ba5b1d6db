"""What the journal holds: its tables, what is written into them and how."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from gyre.cell.messages import Manifest, StepCommitted
from gyre.trajectory.records import CallRecord, CallRetried, ExecutionResult, ExecutionSpec
from gyre.trajectory.roles import ExecutionCounts

SCHEMA_VERSION = 2

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE executions (
    execution TEXT PRIMARY KEY, group_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    opening INTEGER NOT NULL, spec BLOB NOT NULL, ended BLOB);
CREATE INDEX executions_by_group ON executions (group_id);
CREATE TABLE calls (
    position INTEGER PRIMARY KEY, execution TEXT NOT NULL, opening INTEGER NOT NULL, call TEXT NOT NULL,
    record BLOB NOT NULL, UNIQUE (execution, opening, call));
CREATE TABLE retries (
    position INTEGER PRIMARY KEY, execution TEXT NOT NULL, opening INTEGER NOT NULL, call TEXT NOT NULL);
CREATE INDEX retries_by_execution ON retries (execution);
CREATE TABLE undelivered (
    execution TEXT NOT NULL, opening INTEGER NOT NULL, call TEXT NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (execution, opening, call)) WITHOUT ROWID;
CREATE TABLE groups (group_id TEXT PRIMARY KEY, step INTEGER NOT NULL, outcome BLOB NOT NULL);
CREATE TABLE step_members (
    group_id TEXT PRIMARY KEY, step INTEGER NOT NULL, member BLOB NOT NULL);
CREATE TABLE contributions (position INTEGER PRIMARY KEY, step INTEGER NOT NULL, manifest BLOB NOT NULL);
CREATE INDEX contributions_by_step ON contributions (step);
CREATE TABLE steps (step INTEGER PRIMARY KEY, committed BLOB NOT NULL);
"""


class EndedExecution(msgspec.Struct, frozen=True, kw_only=True):
    """An execution that is over."""

    spec: ExecutionSpec
    result: ExecutionResult
    counts: ExecutionCounts


class Undelivered(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that engines sampled for an execution's last attempt and no record has, by call."""

    execution: str
    tokens: dict[str, int]


class GroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A group whose executions have all ended. `scores` and `advantages` are by execution, of scored ones
    only. `version` is the one it was dispatched at. Each token that was sampled for it is one of
    `trained_tokens` or of `excluded_tokens`, by reason."""

    group: str
    split: Literal["train", "eval"]
    step: int
    version: int
    scores: dict[str, float]
    advantages: dict[str, float] = {}
    discarded: bool = False
    trained_tokens: int = 0
    excluded_tokens: dict[str, int] = {}

    @property
    def without_signal(self) -> bool:
        """All scores are the same: it counts in its step's mean, and nothing of it is trained."""
        return self.split == "train" and not self.discarded and not any(self.advantages.values())


class StepMember(msgspec.Struct, frozen=True, kw_only=True):
    """A group that belongs to a step, decided once: its count of executions and its micro-steps' ids."""

    step: int
    group: str
    executions: int
    micro_steps: tuple[str, ...]


class RewindSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The job goes on at `step`, from a checkpoint: membership, contributions and commits of that step and
    later ones are forgotten, to be made again."""

    step: int


Entry = (
    ExecutionSpec
    | CallRecord
    | CallRetried
    | Undelivered
    | EndedExecution
    | GroupOutcome
    | StepMember
    | Manifest
    | StepCommitted
    | RewindSteps
)
Statement = tuple[str, tuple[Any, ...]]

_OPENING = "(SELECT opening FROM executions WHERE execution = ?)"


class _StoredCall(msgspec.Struct, frozen=True, array_like=True):
    """A CallRecord on disk: numbers as little-endian arrays, content as JSON (it may hold integers
    beyond 64 bits, which msgpack refuses)."""

    execution: str
    call: str
    parent: str | None
    new_input_ids: bytes
    output_ids: bytes
    logprobs: bytes
    versions: bytes
    finish_reason: str
    messages: bytes
    output_message: bytes
    has_tools: bool
    tool_calls: dict[str, str]
    started_s: float
    finished_s: float
    reroutes: int
    kv_versions: bytes = b""
    moved_at: tuple[int, ...] = ()
    parsed_tool_calls: int = 0
    malformed_tool_calls: int = 0
    digest: bytes = b""
    request_key: bytes = b""
    cached_tokens: int = 0


def encode_call(record: CallRecord) -> bytes:
    return msgspec.msgpack.encode(
        _StoredCall(
            record.execution,
            record.call,
            record.parent,
            np.asarray(record.new_input_ids, "<i4").tobytes(),
            np.asarray(record.output_ids, "<i4").tobytes(),
            np.asarray(record.logprobs, "<f8").tobytes(),
            np.asarray(record.versions, "<i4").tobytes(),
            record.finish_reason,
            msgspec.json.encode(record.messages),
            msgspec.json.encode(record.output_message),
            record.has_tools,
            record.tool_calls,
            record.started_s,
            record.finished_s,
            record.reroutes,
            np.asarray(record.kv_versions, "<i4").tobytes(),
            record.moved_at,
            record.parsed_tool_calls,
            record.malformed_tool_calls,
            record.digest,
            record.request_key,
            record.cached_tokens,
        )
    )


def decode_call(blob: bytes) -> CallRecord:
    stored = msgspec.msgpack.decode(blob, type=_StoredCall)
    return CallRecord(
        execution=stored.execution,
        call=stored.call,
        parent=stored.parent,
        new_input_ids=tuple(np.frombuffer(stored.new_input_ids, "<i4").tolist()),
        output_ids=tuple(np.frombuffer(stored.output_ids, "<i4").tolist()),
        logprobs=tuple(np.frombuffer(stored.logprobs, "<f8").tolist()),
        versions=tuple(np.frombuffer(stored.versions, "<i4").tolist()),
        finish_reason=stored.finish_reason,
        messages=msgspec.json.decode(stored.messages, type=tuple[dict[str, Any], ...]),
        output_message=msgspec.json.decode(stored.output_message, type=dict[str, Any]),
        has_tools=stored.has_tools,
        tool_calls=stored.tool_calls,
        started_s=stored.started_s,
        finished_s=stored.finished_s,
        reroutes=stored.reroutes,
        kv_versions=tuple(np.frombuffer(stored.kv_versions, "<i4").tolist()),
        moved_at=stored.moved_at,
        parsed_tool_calls=stored.parsed_tool_calls,
        malformed_tool_calls=stored.malformed_tool_calls,
        digest=stored.digest,
        request_key=stored.request_key,
        cached_tokens=stored.cached_tokens,
    )


def statements(entry: Entry) -> list[Statement]:
    """The SQL that journals an entry. Raises what encoding raises, before anything is written."""
    pack = msgspec.msgpack.encode
    match entry:
        case ExecutionSpec():
            sql = (
                "INSERT INTO executions (execution, group_id, attempt, opening, spec) VALUES (?, ?, ?, 0, ?)"
                " ON CONFLICT (execution) DO UPDATE SET attempt = excluded.attempt, opening = opening + 1,"
                " spec = excluded.spec, ended = NULL"
            )
            return [(sql, (entry.execution, entry.group, entry.attempt, pack(entry)))]
        case CallRecord():
            sql = (
                f"INSERT INTO calls (execution, opening, call, record) VALUES (?, {_OPENING}, ?, ?)"
                " ON CONFLICT (execution, opening, call) DO NOTHING"
            )
            return [(sql, (entry.execution, entry.execution, entry.call, encode_call(entry)))]
        case CallRetried():
            sql = f"INSERT INTO retries (execution, opening, call) VALUES (?, {_OPENING}, ?)"
            return [(sql, (entry.execution, entry.execution, entry.call))]
        case Undelivered():
            sql = (
                "INSERT OR REPLACE INTO undelivered (execution, opening, call, tokens)"
                f" VALUES (?, {_OPENING}, ?, ?)"
            )
            name = entry.execution
            return [(sql, (name, name, call, tokens)) for call, tokens in entry.tokens.items()]
        case EndedExecution():
            spec = entry.spec
            sql = (
                "INSERT INTO executions (execution, group_id, attempt, opening, spec, ended)"
                " VALUES (?, ?, ?, 0, ?, ?) ON CONFLICT (execution) DO UPDATE SET ended = excluded.ended"
            )
            return [(sql, (spec.execution, spec.group, spec.attempt, pack(spec), pack(entry)))]
        case GroupOutcome():
            sql = "INSERT OR REPLACE INTO groups (group_id, step, outcome) VALUES (?, ?, ?)"
            return [(sql, (entry.group, entry.step, pack(entry)))]
        case StepMember():
            sql = "INSERT OR REPLACE INTO step_members (group_id, step, member) VALUES (?, ?, ?)"
            return [(sql, (entry.group, entry.step, pack(entry)))]
        case Manifest():
            return [("INSERT INTO contributions (step, manifest) VALUES (?, ?)", (entry.step, pack(entry)))]
        case StepCommitted():
            sql = "INSERT OR REPLACE INTO steps (step, committed) VALUES (?, ?)"
            return [(sql, (entry.step, pack(entry)))]
        case RewindSteps():
            tables = ("step_members", "contributions", "steps")
            return [(f"DELETE FROM {table} WHERE step >= ?", (entry.step,)) for table in tables]
