"""What is recorded of an execution: the messages between proxy, harness and trajectory rooms."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gyre.actors import Ask, Tell
from gyre.cell.engine import SampledLeg

Role = Literal["main", "main_summary", "sub_agent", "sub_agent_summary", "auxiliary"]
# The `finish_reason` of a call that nobody was answered.
UNFINISHED = "unfinished"
EndReason = Literal["completed", "harness_error", "harness_timeout", "overall_timeout", "never_started"]


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One model call of a harness, as it was sampled. Durable before the answer's last byte leaves.

    `parent` is the node (a call id) whose path (its prompt and output) is a prefix of this prompt, None at
    a root; `new_input_ids` is what the prompt adds to that path, so that journal bytes are proportional
    to new content. `output_ids`, `logprobs` and `versions` have one entry per sampled token, and so has
    `kv_versions`: of the oldest weights whose KV a token was sampled over (`rollout.on_publish = "keep"`); ()
    where that is each token's own version.
    `messages` are the new messages of the request (canonical JSON) for role proofs and for people;
    `tool_calls` maps call id to raw sampled text. `finish_reason` is UNFINISHED where the call was cancelled
    or failed: the record has what was sampled until then, and no call goes on from it. `moved_at` are the
    positions in the output at which it went on at another engine. `parsed_tool_calls` are well-formed; of
    malformed ones those that name their tool are in `tool_calls` too. `digest` is of the conversation,
    `request_key` of all that was asked: a proxy that starts anew knows by them what it has answered.
    """

    execution: str
    call: str
    parent: str | None
    new_input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    messages: tuple[dict[str, Any], ...]
    output_message: dict[str, Any]
    has_tools: bool
    tool_calls: dict[str, str]
    started_s: float
    finished_s: float
    reroutes: int = 0
    kv_versions: tuple[int, ...] = ()
    moved_at: tuple[int, ...] = ()
    parsed_tool_calls: int = 0
    malformed_tool_calls: int = 0
    digest: bytes = b""
    request_key: bytes = b""
    cached_tokens: int = 0


class RecordCall(Ask[None], frozen=True, kw_only=True):
    """The proxy to the TrajectoryActor: answered when the record is durable."""

    record: CallRecord


class RecordSampled(Ask[None], frozen=True, kw_only=True):
    """The proxy to the TrajectoryActor, when an execution takes no more calls: what engines say that they
    sampled for it, those of calls of an earlier attempt too. What is in no record was not delivered. Answered
    when that is durable."""

    execution: str
    legs: tuple[SampledLeg, ...]


class CallRetried(Tell, frozen=True, kw_only=True):
    """The proxy to the TrajectoryActor: the harness repeated `call`, whose answer had not reached it, and
    was given the same sample (or joined it in flight)."""

    execution: str
    call: str


def call_name(execution: str, attempt: int, number: int) -> str:
    """The id of an attempt's calls, counted from 0."""
    return f"{_calls_of(execution, attempt)}{number:04d}"


def is_call_of(call: str, execution: str, attempt: int) -> bool:
    return call.startswith(_calls_of(execution, attempt))


def _calls_of(execution: str, attempt: int) -> str:
    return f"{execution}-{attempt}-"


class ExecutionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An execution that was dispatched: one of a group, or of an evaluation (`split == "eval"`).

    Group ids are `g` or, for an evaluation, `e`, and six digits: numbers count from 0. All executions of
    one evaluation are one group. `group_executions` says how many the group has, `step` is that of its
    Dispatch. `refill` counts how often it was dropped and is played anew, with other draws each time.
    """

    execution: str
    group: str
    task: str
    split: Literal["train", "eval"]
    index: int
    attempt: int
    version_dispatched: int
    group_executions: int
    step: int
    refill: int = 0


class ExecutionResult(msgspec.Struct, frozen=True, kw_only=True):
    """How an execution ended. `score` is None where it is dropped (overall time-out, evaluation failed
    beyond its budget); a placeholder (`never_started`) has score 0 and no tree."""

    execution: str
    reason: EndReason
    score: float | None
    seconds: float
    exit_code: int | None = None
    detail: str = ""


class ExecutionOpened(Ask[None], frozen=True, kw_only=True):
    """The HarnessActor to the TrajectoryActor: an attempt begins. Calls of an earlier attempt of the same
    execution are no longer part of its tree (they stay in the journal)."""

    spec: ExecutionSpec


class ExecutionEnded(Ask[None], frozen=True, kw_only=True):
    """The HarnessActor to the TrajectoryActor: answered when the result is durable."""

    spec: ExecutionSpec
    result: ExecutionResult
