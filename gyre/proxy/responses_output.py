"""The answers of OpenAI's Responses, whole and as events."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from gyre.proxy.api import deltas, server_event
from gyre.proxy.conversation import (
    CallError,
    CallRequest,
    Completion,
    Opening,
    ToolCall,
    ToolPlace,
    wire_id,
)
from gyre.proxy.live import Part


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


class OutputEvents:
    """The same as an EventStream: items are added empty, filled and done, one after another."""

    def __init__(self, request: CallRequest) -> None:
        self._request = request
        self._numbers = count()
        self._begun: dict[str, Any] | None = None
        self._name = self._item_id = ""
        self._index = 0
        self._part: Part | None = None
        self._said: list[str] = []

    def begin(self, opening: Opening) -> Iterator[bytes]:
        self._name = wire_id(opening.call)
        limit = self._request.max_tokens
        self._begun = _begun(self._name, opening.created_s, opening.model, max_output_tokens=limit)
        yield self._event("response.created", response=self._begun)
        yield self._event("response.in_progress", response=self._begun)

    def say(self, part: Part, text: str) -> Iterator[bytes]:
        if part != self._part:
            yield from self._close("completed")
            self._part = part
            yield from self._add(self._spoken("in_progress"))
        self._said.append(text)
        yield self._fill(*_delta(part, text))

    def end(self, completion: Completion) -> Iterator[bytes]:
        whole = response(self._request, completion)
        if self._part is not None:
            yield from self._close(whole["output"][self._index]["status"])
        for item in whole["output"][self._index :]:
            yield from self._add(item)
            if item["type"] == "function_call":
                for piece in deltas(item["arguments"]):
                    yield self._fill("response.function_call_arguments.delta", {"delta": piece})
            yield from self._done(item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def error(self, error: CallError) -> bytes:
        code = error.code if error.status < 500 and error.code else "server_error"
        created = b""
        if self._begun is None:
            self._begun = _begun("failed", 0, "")
            created = self._event("response.created", response=self._begun)
        failed = self._begun | {"status": "failed", "error": {"code": code, "message": error.message}}
        return created + self._event("response.failed", response=failed)

    def _spoken(self, status: str) -> dict[str, Any]:
        """The item that is open, with what was said of it."""
        item = _reasoning if self._part == "reasoning" else _message
        return item(self._name, "".join(self._said)) | {"status": status}

    def _close(self, status: str) -> Iterator[bytes]:
        """The item that is open, if one is."""
        if self._part is not None:
            yield from self._done(self._spoken(status))
        self._part = None
        self._said = []

    def _add(self, item: dict[str, Any]) -> Iterator[bytes]:
        kind, self._item_id = item["type"], item["id"]
        empty = item | {"status": "in_progress", **_EMPTY[kind]}
        yield self._event("response.output_item.added", output_index=self._index, item=empty)
        for name, fields in _STARTS[kind]:
            yield self._fill(name, fields)

    def _done(self, item: dict[str, Any]) -> Iterator[bytes]:
        for name, fields in _ends(item):
            yield self._fill(name, fields)
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._index += 1

    def _fill(self, name: str, fields: dict[str, Any]) -> bytes:
        return self._event(name, item_id=self._item_id, output_index=self._index, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return server_event(name, {"sequence_number": next(self._numbers), **fields})


def _begun(name: str, created_at: int, model: str, **fields: Any) -> dict[str, Any]:
    return _response(name, status="in_progress", created_at=created_at, model=model, **fields)


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
        items.append(_reasoning(name, message.reasoning))
    if message.text or (not items and not message.tool_calls):
        items.append(_message(name, message.text))
    for index, call in enumerate(message.tool_calls):
        items.append(_function_call(f"fc_{name}_{index}", call, request.namespaces.get(call.name)))
    # Only the last can have been cut off: in a stream the others were done by then.
    last = "incomplete" if completion.finish_reason == "length" else "completed"
    statuses = ["completed"] * (len(items) - 1) + [last]
    return [item | {"status": status} for item, status in zip(items, statuses, strict=True)]


def _reasoning(name: str, text: str) -> dict[str, Any]:
    # Clients send a summary back, and not always the content.
    summary = [{"type": "summary_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{name}", "summary": summary, "encrypted_content": name}


def _message(name: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": content}


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
_SUMMARY: dict[str, Any] = {"summary_index": 0}
_CONTENT: dict[str, Any] = {"content_index": 0}
_NO_SUMMARY = {"type": "summary_text", "text": ""}
_NO_CONTENT = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
# By an item's type: what is empty of it at first, and what begins to fill it.
_EMPTY: dict[str, dict[str, Any]] = {
    "reasoning": {"summary": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
}
_STARTS: dict[str, list[_Event]] = {
    "reasoning": [("response.reasoning_summary_part.added", {**_SUMMARY, "part": _NO_SUMMARY})],
    "message": [("response.content_part.added", {**_CONTENT, "part": _NO_CONTENT})],
    "function_call": [],
}


def _delta(part: Part, text: str) -> _Event:
    if part == "reasoning":
        return "response.reasoning_summary_text.delta", {**_SUMMARY, "delta": text}
    return "response.output_text.delta", {**_CONTENT, "delta": text, "logprobs": []}


def _ends(item: dict[str, Any]) -> list[_Event]:
    """What says the whole of an item, before it is done."""
    if item["type"] == "function_call":
        whole = {"name": item["name"], "arguments": item["arguments"]}
        return [("response.function_call_arguments.done", whole)]
    if item["type"] == "reasoning":
        (part,) = item["summary"]
        return [
            ("response.reasoning_summary_text.done", {**_SUMMARY, "text": part["text"]}),
            ("response.reasoning_summary_part.done", {**_SUMMARY, "part": part}),
        ]
    (part,) = item["content"]
    return [
        ("response.output_text.done", {**_CONTENT, "text": part["text"], "logprobs": []}),
        ("response.content_part.done", {**_CONTENT, "part": part}),
    ]
