"""Anthropic's Messages, as harnesses really send them: unknown fields are passed over, and so is what says
how to draw tokens (temperature, top_p, top_k, stop_sequences, thinking), because the job decides that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec

from gyre.proxy.api import (
    EventStream,
    decode_body,
    function_tool,
    hints_of,
    left_out,
    not_supported,
    says_retry,
    server_event,
)
from gyre.proxy.conversation import (
    CallError,
    CallRequest,
    Completion,
    Conversation,
    Message,
    ToolCall,
    bad_request,
    without_billing,
)
from gyre.proxy.messages_output import MessageEvents, error_fields, message


class _Block(msgspec.Struct):
    """A content block of any type; which fields it has depends on that."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None


_Content = str | list[_Block]


class _Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: _Content


class _Tool(msgspec.Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _ToolChoice(msgspec.Struct):
    type: str | None = None


class _Body(msgspec.Struct):
    messages: Annotated[list[_Turn], msgspec.Meta(min_length=1)]
    model: str = ""
    system: _Content | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None


_DECODER = msgspec.json.Decoder(_Body)
_Result = list[_Block] | str | None


class _Speech:
    """What the paths of this API have in common."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> CallRequest:
        fields = decode_body(_DECODER, body, "a messages request")
        tools = _tools(fields.tools or [])
        return CallRequest(
            conversation=Conversation(messages=_messages(fields), tools=tools),
            model=fields.model,
            max_tokens=fields.max_tokens,
            stream=bool(fields.stream),
            parse_tools=bool(tools) and not (fields.tool_choice and fields.tool_choice.type == "none"),
            hints=hints_of(headers),
            is_retry=says_retry(headers),
        )

    def error(self, error: CallError) -> bytes:
        return msgspec.json.encode({"type": "error", **error_fields(error)})


class CountTokens(_Speech):
    """The codec of `/v1/messages/count_tokens`."""

    path = "/v1/messages/count_tokens"

    def count(self, prompt_tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": prompt_tokens})


class Messages(_Speech):
    """The codec of `/v1/messages`. The signature of a thinking block is the call's id."""

    path = "/v1/messages"
    keep_alive = server_event("ping", {})

    def answer(self, request: CallRequest, completion: Completion) -> bytes:
        return msgspec.json.encode(message(completion))

    def stream(self, request: CallRequest) -> EventStream:
        return MessageEvents()


def _messages(body: _Body) -> tuple[Message, ...]:
    messages: list[Message] = []
    if body.system:
        messages.append(_system("system", body.system))
    for place, turn in enumerate(body.messages):
        where = f"messages[{place}].content"
        if turn.role == "system":
            messages.append(_system(where, turn.content))
        elif turn.role == "assistant":
            messages.append(_assistant(where, turn.content))
        else:
            messages += _user(where, turn.content)
    return tuple(messages)


def _system(place: str, content: _Content) -> Message:
    return Message(role="system", content=without_billing(_texts(_placed(place, content))))


def _user(place: str, content: _Content) -> Iterator[Message]:
    """A turn's texts and tool results, in their order, each kind as the messages it is elsewhere."""
    if not content:
        yield Message(role="user")
        return
    kinds = groupby(_placed(place, content), key=lambda placed: placed[1].type == "tool_result")
    for are_results, placed in kinds:
        if not are_results:
            yield Message(role="user", content=_texts(placed))
            continue
        for where, block in placed:
            result = _result(f"{where}.content", block.content)
            yield Message(role="tool", content=result, tool_call_id=block.tool_use_id or "")


def _assistant(place: str, content: _Content) -> Message:
    texts: list[tuple[str, _Block]] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    sampled_as: str | None = None
    for where, block in _placed(place, content):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
            sampled_as = sampled_as or block.signature
        elif block.type == "tool_use":
            if block.name is None:
                raise bad_request(f"{where}.name is missing")
            calls.append(ToolCall(id=block.id or "", name=block.name, arguments=block.input or {}))
        elif block.type != "redacted_thinking":
            texts.append((where, block))
    return Message(
        role="assistant",
        content=_texts(texts),
        tool_calls=tuple(calls),
        reasoning="\n".join(thoughts) or None,
        sampled_as=sampled_as or None,
    )


def _placed(place: str, content: _Content) -> list[tuple[str, _Block]]:
    if isinstance(content, str):
        return [(place, _Block(type="text", text=content))]
    return [(f"{place}[{index}]", block) for index, block in enumerate(content)]


def _texts(placed: Iterable[tuple[str, _Block]]) -> tuple[str, ...]:
    texts: list[str] = []
    for where, block in placed:
        if block.type != "text":
            raise not_supported(where, block.type)
        if block.text is None:
            raise bad_request(f"{where}.text is missing")
        texts.append(block.text)
    return tuple(text for text in texts if text)


def _result(place: str, content: Any) -> tuple[str, ...]:
    try:
        decoded = msgspec.convert(content, _Result)
    except (msgspec.ValidationError, RecursionError) as error:
        raise bad_request(f"{place} is neither text nor a list of blocks: {error}") from None
    blocks = _placed(place, decoded or "")
    shown = [(where, block if block.type == "text" else _described(block)) for where, block in blocks]
    return _texts(shown)


def _described(block: _Block) -> _Block:
    return _Block(type="text", text=left_out(block.type))


def _tools(tools: list[_Tool]) -> tuple[dict[str, Any], ...]:
    """Those that have a schema of their own: a policy cannot use a vendor's built-in ones."""
    offered: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            continue
        if tool.name is None:
            raise bad_request(f"tools[{index}].name is missing")
        offered.append(function_tool(tool.name, tool.description, tool.input_schema))
    return tuple(offered)
