"""An execution as it was, from its recorded calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from gyre.proxy.api import parse_arguments
from gyre.proxy.calls import CallDesk, finish_reason
from gyre.proxy.conversation import Completion, Conversation, Message, ToolCall
from gyre.proxy.executions import Execution
from gyre.trajectory.records import UNFINISHED, CallRecord


def restore(
    desk: CallDesk, execution: Execution, records: Iterable[CallRecord], delivered: Set[str], lives: int
) -> None:
    """`records` in the order that they were recorded; `delivered` are the calls whose answers have reached
    the harness: of others it may ask again. The proxy has had so many `lives` before."""
    index = execution.index
    execution.has_lived(lives)
    for record in records:
        execution.has_made(record.call)
        prompt = index.prompt_digest(record.parent, record.new_input_ids)
        execution.prompts[prompt] += 1
        if record.finish_reason == UNFINISHED:
            continue
        asked = tuple(_asked(message) for message in record.messages)
        execution.compactions.recorded(Conversation(messages=asked))
        answer = answered(record)
        index.add(
            record.call,
            parent=record.parent,
            digest=record.digest,
            answer=answer,
            new_input_ids=record.new_input_ids,
            output_ids=record.output_ids,
        )
        if record.call not in delivered:
            prompt_tokens = len(index.path_ids(record.call)) - len(record.output_ids)
            completion = Completion(
                call=record.call,
                model=desk.model_name,
                created_s=int(record.started_s),
                prompt_tokens=prompt_tokens,
                cached_tokens=record.cached_tokens,
                message=answer,
                finish_reason=finish_reason(record.finish_reason, answer),
                completion_tokens=len(record.output_ids),
                reasoning_tokens=desk.reasoning_tokens(record.output_ids, answer),
            )
            execution.keep_undelivered(record.request_key, completion)


def answered(record: CallRecord) -> Message:
    """A recorded answer as it was decoded."""
    message = record.output_message
    content = message["content"]
    return Message(
        role="assistant",
        content=(content,) if content else (),
        tool_calls=tuple(_tool_call(call, record.tool_calls) for call in message.get("tool_calls", ())),
        reasoning=message.get("reasoning_content"),
    )


def _asked(message: dict[str, Any]) -> Message:
    """Who says it, and what."""
    content = message["content"]
    blocks = [part["text"] for part in content] if isinstance(content, list) else [content]
    return Message(role=message["role"], content=tuple(block for block in blocks if block))


def _tool_call(call: dict[str, Any], raw_calls: Mapping[str, str]) -> ToolCall:
    function = call["function"]
    return ToolCall(
        id=call["id"],
        name=function["name"],
        arguments=parse_arguments(function["arguments"]),
        raw=raw_calls.get(call["id"]),
    )
