"""OpenAI's Responses, as harnesses really send them: whole inputs with every call, because no response is
kept here. Unknown fields are passed over, and so is what says how to draw tokens (temperature, top_p,
reasoning, text), because the job decides that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from gyre.proxy.api import EventStream, decode_body, hints_of, openai_error, says_retry
from gyre.proxy.conversation import (
    CallError,
    CallRequest,
    Completion,
    Conversation,
    Message,
    ToolPlace,
    bad_request,
)
from gyre.proxy.responses_input import Item, messages_of
from gyre.proxy.responses_output import OutputEvents, response
from gyre.proxy.responses_tools import Tool, offered_tools


class _Body(msgspec.Struct):
    input: str | list[Item] | None = None
    instructions: str | None = None
    model: str = ""
    tools: list[Tool] | None = None
    tool_choice: Any = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None


_DECODER = msgspec.json.Decoder(_Body)


class _Speech:
    """What the paths of this API have in common."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> CallRequest:
        fields = decode_body(_DECODER, body, "a responses request")
        _refuse_what_is_kept_elsewhere(fields)
        tools, places = offered_tools(fields.tools or [])
        return CallRequest(
            conversation=Conversation(messages=_messages(fields, places), tools=tools),
            model=fields.model,
            max_tokens=fields.max_output_tokens,
            stream=bool(fields.stream),
            parse_tools=bool(tools) and fields.tool_choice != "none",
            hints=hints_of(headers),
            is_retry=says_retry(headers),
            namespaces=places,
        )

    def error(self, error: CallError) -> bytes:
        return msgspec.json.encode(openai_error(error))


class InputTokens(_Speech):
    """The codec of `/v1/responses/input_tokens`."""

    path = "/v1/responses/input_tokens"

    def count(self, prompt_tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": prompt_tokens})


class Responses(_Speech):
    """The codec of `/v1/responses`. Ids of output items, and what a reasoning item has encrypted, name the
    call."""

    path = "/v1/responses"
    keep_alive = b": waiting\n\n"

    def answer(self, request: CallRequest, completion: Completion) -> bytes:
        return msgspec.json.encode(response(request, completion))

    def stream(self, request: CallRequest) -> EventStream:
        return OutputEvents(request)


def _refuse_what_is_kept_elsewhere(body: _Body) -> None:
    if body.previous_response_id is not None or body.conversation is not None:
        place = "conversation" if body.previous_response_id is None else "previous_response_id"
        raise bad_request(f"{place} is not supported: no response is kept here; send the whole input")
    if body.prompt is not None:
        raise bad_request("prompt is not supported: no prompt is kept here; send instructions and input")
    if body.background:
        raise bad_request("background = true is not supported; wait for the answer, or stream it")


def _messages(body: _Body, places: Mapping[str, ToolPlace]) -> tuple[Message, ...]:
    before = [Message(role="system", content=(body.instructions,))] if body.instructions else []
    if isinstance(body.input, str):
        return (*before, Message(role="user", content=(body.input,) if body.input else ()))
    messages = (*before, *messages_of(body.input or [], places))
    if not messages:
        raise bad_request("input is missing or empty")
    return messages
