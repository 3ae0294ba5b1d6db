"""The answers of OpenAI's Responses, whole and as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from gyre.proxy.api import deltas, server_event
from gyre.proxy.conversation import CallError, CallRequest, Completion, ToolCall, ToolPlace, wire_id


def response(request: CallRequest, completion: Completion) -> dict[str, Any]:
    """The whole answer as JSON."""
    is_cut = completion.finish_reason == "length"
    return _response(
        wire_id(completion.call),
        status="incomplete" if is_cut else "completed",
        created_at=completion.created_s,
        model=completion.model,
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        max_output_tokens=request.max_tokens,
        output=_output(request, completion),
        usage=_usage(completion),
    )


def output_events(request: CallRequest, completion: Completion) -> Iterator[bytes]:
    """The same as server-sent events."""
    whole = response(request, completion)
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    numbers = count()

    def event(name: str, /, **fields: Any) -> bytes:
        return server_event(name, {"sequence_number": next(numbers), **fields})

    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        filling = {"status": "in_progress", **_EMPTY[item["type"]]}
        yield event("response.output_item.added", output_index=index, item=item | filling)
        for name, fields in _FILLINGS[item["type"]](item):
            yield event(name, item_id=item["id"], output_index=index, **fields)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{whole['status']}", response=whole)


def error_events(error: CallError) -> bytes:
    """A response that failed before it said anything."""
    code = error.code if error.status < 500 and error.code else "server_error"
    begun = _response("failed", status="in_progress")
    failed = begun | {"status": "failed", "error": {"code": code, "message": error.message}}
    created = server_event("response.created", {"sequence_number": 0, "response": begun})
    return created + server_event("response.failed", {"sequence_number": 1, "response": failed})


def _response(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": 0,
        "status": "",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": "",
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        **fields,
    }


def _output(request: CallRequest, completion: Completion) -> list[dict[str, Any]]:
    name, message = wire_id(completion.call), completion.message
    items: list[dict[str, Any]] = []
    if message.reasoning is not None:
        # Clients send a summary back, and not always the content.
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": summary, "encrypted_content": name})
    if message.text or (not items and not message.tool_calls):
        content = [{"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "content": content})
    for index, call in enumerate(message.tool_calls):
        items.append(_function_call(f"fc_{name}_{index}", call, request.namespaces.get(call.name)))
    status = "incomplete" if completion.finish_reason == "length" else "completed"
    return [item | {"status": status} for item in items]


def _function_call(item_id: str, call: ToolCall, place: ToolPlace | None) -> dict[str, Any]:
    placed = {"name": call.name} if place is None else {"name": place.name, "namespace": place.namespace}
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call.id,
        "arguments": call.arguments_json,
        **placed,
    }


def _usage(completion: Completion) -> dict[str, Any]:
    return {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": completion.reasoning_tokens},
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
    }


_Event = tuple[str, dict[str, Any]]


def _reasoning_events(item: Mapping[str, Any]) -> Iterator[_Event]:
    (part,) = item["summary"]
    at = {"summary_index": 0}
    yield "response.reasoning_summary_part.added", {**at, "part": part | {"text": ""}}
    for piece in deltas(part["text"]):
        yield "response.reasoning_summary_text.delta", {**at, "delta": piece}
    yield "response.reasoning_summary_text.done", {**at, "text": part["text"]}
    yield "response.reasoning_summary_part.done", {**at, "part": part}


def _text_events(item: Mapping[str, Any]) -> Iterator[_Event]:
    (part,) = item["content"]
    at = {"content_index": 0}
    yield "response.content_part.added", {**at, "part": part | {"text": ""}}
    for piece in deltas(part["text"]):
        yield "response.output_text.delta", {**at, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**at, "part": part}


def _argument_events(item: Mapping[str, Any]) -> Iterator[_Event]:
    for piece in deltas(item["arguments"]):
        yield "response.function_call_arguments.delta", {"delta": piece}
    yield "response.function_call_arguments.done", {"name": item["name"], "arguments": item["arguments"]}


# By an item's type: what is empty of it at first, and what fills it.
_EMPTY: dict[str, dict[str, Any]] = {
    "reasoning": {"summary": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
}
_FILLINGS = {"reasoning": _reasoning_events, "message": _text_events, "function_call": _argument_events}
