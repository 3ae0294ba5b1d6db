"""OpenAI's Chat Completions, as harnesses really send it: unknown fields are passed over, and so are
temperature, top_p and stop, because the job decides how tokens are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from gyre.proxy.api import (
    EventStream,
    decode_body,
    hints_of,
    left_out,
    not_supported,
    openai_error,
    parse_arguments,
    says_retry,
)
from gyre.proxy.conversation import (
    CallError,
    CallRequest,
    Completion,
    Conversation,
    Message,
    MessageRole,
    Opening,
    ToolCall,
    bad_request,
)
from gyre.proxy.live import Part

_ROLES: dict[str, MessageRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


_Tokens = Annotated[int, msgspec.Meta(ge=1)] | None


class _Body(msgspec.Struct):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: _Tokens = None
    max_completion_tokens: _Tokens = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


_DECODER = msgspec.json.Decoder(_Body)


class ChatCompletions:
    """The codec of `/v1/chat/completions`."""

    path = "/v1/chat/completions"
    keep_alive = b": waiting\n\n"

    def parse(self, body: bytes, headers: Mapping[str, str]) -> CallRequest:
        fields = decode_body(_DECODER, body, "a chat completion request")
        if fields.n not in (None, 1):
            raise bad_request(f"n = {fields.n} is not supported; send n = 1")
        options = fields.stream_options
        tools = _tools(fields.tools or [])
        return CallRequest(
            conversation=Conversation(
                messages=tuple(_message(place, message) for place, message in enumerate(fields.messages)),
                tools=tools,
            ),
            model=fields.model,
            max_tokens=fields.max_completion_tokens or fields.max_tokens,
            stream=bool(fields.stream),
            include_usage=bool(options and options.include_usage),
            parse_tools=bool(tools) and fields.tool_choice != "none",
            hints=hints_of(headers),
            is_retry=says_retry(headers),
        )

    def answer(self, request: CallRequest, completion: Completion) -> bytes:
        choice = {
            "index": 0,
            "message": completion.message.to_openai() | {"refusal": None},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
        }
        return msgspec.json.encode(
            _envelope(completion, "chat.completion") | {"choices": [choice], "usage": _usage(completion)}
        )

    def stream(self, request: CallRequest) -> EventStream:
        return _Chunks(request)

    def error(self, error: CallError) -> bytes:
        return msgspec.json.encode(openai_error(error))


class _Chunks:
    """An EventStream."""

    def __init__(self, request: CallRequest) -> None:
        self._include_usage = request.include_usage
        self._envelope: dict[str, Any] = {}

    def begin(self, opening: Opening) -> Iterator[bytes]:
        self._envelope = _envelope(opening, "chat.completion.chunk")
        yield self._delta({"role": "assistant", "content": ""})

    def say(self, part: Part, text: str) -> Iterator[bytes]:
        yield self._delta({"content" if part == "text" else "reasoning_content": text})

    def end(self, completion: Completion) -> Iterator[bytes]:
        for index, call in enumerate(completion.message.to_openai().get("tool_calls", ())):
            yield self._delta({"tool_calls": [{"index": index, **call}]})
        yield self._delta({}, completion.finish_reason)
        if self._include_usage:
            yield self._chunk([], _usage(completion))
        yield b"data: [DONE]\n\n"

    def error(self, error: CallError) -> bytes:
        return _event(openai_error(error))

    def _delta(self, fields: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return self._chunk([{"index": 0, "delta": fields, "finish_reason": finish_reason}])

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        return _event(self._envelope | {"choices": choices, "usage": usage})


def _message(place: int, message: _Message) -> Message:
    return Message(
        role=_ROLES[message.role],
        content=_content(f"messages[{place}].content", message),
        tool_calls=tuple(_tool_call(call) for call in message.tool_calls or ()),
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning_content,
    )


def _content(place: str, message: _Message) -> tuple[str, ...]:
    content = message.content
    if content is None or isinstance(content, str):
        return (content,) if content else ()
    blocks: list[str] = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None and part.type != "text" and _ROLES[message.role] == "tool":
            text = left_out(part.type)
        if text is None:
            raise not_supported(f"{place}[{index}]", part.type)
        if text:
            blocks.append(text)
    return tuple(blocks)


def _tool_call(call: _ToolCall) -> ToolCall:
    arguments = parse_arguments(call.function.arguments)
    return ToolCall(id=call.id or "", name=call.function.name, arguments=arguments)


def _tools(tools: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Those that are functions: a policy cannot use a vendor's built-in ones."""
    offered: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            continue
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"tools[{index}].function.name is missing")
        offered.append({key: value for key, value in tool.items() if key != "cache_control"})
    return tuple(offered)


def _envelope(opening: Opening, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{opening.call}",
        "object": kind,
        "created": opening.created_s,
        "model": opening.model,
    }


def _usage(completion: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": completion.reasoning_tokens},
    }


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"
