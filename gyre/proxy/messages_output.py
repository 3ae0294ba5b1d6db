"""The answers of Anthropic's Messages, whole and as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gyre.proxy.api import deltas, server_event
from gyre.proxy.conversation import AnswerReason, CallError, Completion, wire_id

_STOP_REASONS: dict[AnswerReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
}


def message(completion: Completion) -> dict[str, Any]:
    """The whole answer as JSON."""
    reason = _STOP_REASONS[completion.finish_reason]
    return _envelope(completion) | {
        "content": _blocks(completion),
        "stop_reason": reason,
        "usage": _usage(completion),
    }


def message_events(completion: Completion) -> Iterator[bytes]:
    """The same as server-sent events."""
    usage = _usage(completion)
    yield server_event("message_start", {"message": _envelope(completion) | {"usage": usage}})
    for index, block in enumerate(_blocks(completion)):
        yield from _block_events(index, block)
    delta = {"stop_reason": _STOP_REASONS[completion.finish_reason], "stop_sequence": None}
    yield server_event("message_delta", {"delta": delta, "usage": usage})
    yield server_event("message_stop", {})


def _envelope(completion: Completion) -> dict[str, Any]:
    return {
        "id": f"msg_{wire_id(completion.call)}",
        "type": "message",
        "role": "assistant",
        "model": completion.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(completion: Completion) -> dict[str, Any]:
    """In this API the tokens that were cached are not among `input_tokens`."""
    return {
        "input_tokens": completion.prompt_tokens - completion.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": completion.cached_tokens,
        "output_tokens": completion.completion_tokens,
    }


def _blocks(completion: Completion) -> list[dict[str, Any]]:
    message = completion.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning is not None:
        signature = wire_id(completion.call)
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if message.text:
        blocks.append({"type": "text", "text": message.text})
    for call in message.tool_calls:
        arguments = msgspec.Raw(call.arguments_json.encode())
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _block_events(index: int, block: dict[str, Any]) -> Iterator[bytes]:
    """A block starts empty and is filled by its deltas."""
    if block["type"] == "text":
        empty: dict[str, Any] = {"text": ""}
        filling = [("text_delta", "text", piece) for piece in deltas(block["text"])]
    elif block["type"] == "thinking":
        empty = {"thinking": "", "signature": ""}
        filling = [("thinking_delta", "thinking", piece) for piece in deltas(block["thinking"])]
        filling.append(("signature_delta", "signature", block["signature"]))
    else:
        empty = {"input": {}}
        arguments = bytes(block["input"]).decode()
        filling = [("input_json_delta", "partial_json", piece) for piece in deltas(arguments)]
    yield server_event("content_block_start", {"index": index, "content_block": block | empty})
    for kind, field, piece in filling:
        delta = {"type": kind, field: piece}
        yield server_event("content_block_delta", {"index": index, "delta": delta})
    yield server_event("content_block_stop", {"index": index})


def error_fields(error: CallError) -> dict[str, Any]:
    """Beside the type of what carries it."""
    kind = _ERROR_TYPES.get(
        error.status, "overloaded_error" if error.status > 500 else "invalid_request_error"
    )
    return {"error": {"type": kind, "message": error.message}}
