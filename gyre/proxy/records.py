"""A call as it is recorded."""

from __future__ import annotations

import time

from gyre.proxy.codec import DecodedAnswer
from gyre.proxy.executions import Flight
from gyre.proxy.prompts import Prompt
from gyre.proxy.routes import Sample
from gyre.trajectory.records import CallRecord


def call_record(
    execution: str, flight: Flight, prompt: Prompt, sample: Sample, answer: DecodedAnswer, started_s: float
) -> CallRecord:
    """Of a call that ends now."""
    return CallRecord(
        execution=execution,
        call=flight.call,
        parent=prompt.parent,
        new_input_ids=tuple(prompt.new_ids),
        output_ids=tuple(sample.token_ids),
        logprobs=tuple(sample.logprobs),
        versions=tuple(sample.versions),
        kv_versions=tuple(sample.kv_versions) if sample.kv_versions != sample.versions else (),
        finish_reason=sample.finish_reason,
        messages=tuple(message.to_openai() for message in prompt.new_messages),
        output_message=answer.message.to_openai(),
        has_tools=bool(flight.request.conversation.tools),
        tool_calls=answer.raw_calls,
        parsed_tool_calls=answer.parsed,
        malformed_tool_calls=answer.malformed,
        started_s=started_s,
        finished_s=time.time(),
        reroutes=sample.reroutes,
        moved_at=tuple(sample.moved_at),
        digest=flight.digests[-1],
        request_key=flight.key,
        cached_tokens=sample.cached_tokens,
    )
