"""The answers of Anthropic's Messages, whole and as events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gyre.proxy.api import deltas, server_event
from gyre.proxy.conversation import AnswerReason, CallError, Completion, Opening, wire_id
from gyre.proxy.live import Part

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
        "usage": _usage(completion, completion.completion_tokens),
    }


class MessageEvents:
    """The same as an EventStream: blocks start empty and are filled by their deltas."""

    def __init__(self) -> None:
        self._signature = ""
        self._part: Part | None = None
        self._index = 0

    def begin(self, opening: Opening) -> Iterator[bytes]:
        self._signature = wire_id(opening.call)
        yield server_event("message_start", {"message": _envelope(opening) | {"usage": _usage(opening, 0)}})

    def say(self, part: Part, text: str) -> Iterator[bytes]:
        if part != self._part:
            yield from self._close()
            self._part = part
            yield self._start(_EMPTY[part])
        kind, field = _DELTAS[part]
        yield self._delta({"type": kind, field: text})

    def end(self, completion: Completion) -> Iterator[bytes]:
        yield from self._close()
        for call in completion.message.tool_calls:
            yield self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            for piece in deltas(call.input_json):
                yield self._delta({"type": "input_json_delta", "partial_json": piece})
            yield self._stop()
        delta = {"stop_reason": _STOP_REASONS[completion.finish_reason], "stop_sequence": None}
        usage = _usage(completion, completion.completion_tokens)
        yield server_event("message_delta", {"delta": delta, "usage": usage})
        yield server_event("message_stop", {})

    def error(self, error: CallError) -> bytes:
        return server_event("error", error_fields(error))

    def _close(self) -> Iterator[bytes]:
        """The block that is open, if one is."""
        if self._part == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        if self._part is not None:
            yield self._stop()
        self._part = None

    def _start(self, block: dict[str, Any]) -> bytes:
        return server_event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return server_event("content_block_delta", {"index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        self._index += 1
        return server_event("content_block_stop", {"index": self._index - 1})


_EMPTY: dict[Part, dict[str, Any]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_DELTAS: dict[Part, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
}


def _envelope(opening: Opening) -> dict[str, Any]:
    return {
        "id": f"msg_{wire_id(opening.call)}",
        "type": "message",
        "role": "assistant",
        "model": opening.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(opening: Opening, output_tokens: int) -> dict[str, Any]:
    """In this API the tokens that were cached are not among `input_tokens`."""
    return {
        "input_tokens": opening.prompt_tokens - opening.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": opening.cached_tokens,
        "output_tokens": output_tokens,
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
        arguments = msgspec.Raw(call.input_json.encode())
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def error_fields(error: CallError) -> dict[str, Any]:
    """Beside the type of what carries it."""
    kind = _ERROR_TYPES.get(
        error.status, "overloaded_error" if error.status > 500 else "invalid_request_error"
    )
    return {"error": {"type": kind, "message": error.message}}
