"""How a policy writes tool calls in its text, and how tools are told to it where its template cannot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from gyre.proxy.live import Certain, before_marker

_JSON = json.JSONDecoder()
# Deeper arguments would break recursive encoders later on; no tool has such.
_MAX_DEPTH = 64


class SampledCall(NamedTuple):
    """A well-formed tool call in sampled text; `raw` is the text it was parsed from."""

    name: str
    arguments: dict[str, Any]
    raw: str


class SampledAnswer(NamedTuple):
    """Sampled text, parsed. `content` is what is not a well-formed call: a malformed one is shown to the
    harness as it was sampled, and by it to the model."""

    content: str
    calls: tuple[SampledCall, ...]
    malformed: int


class ToolFormat(Protocol):
    """One way of writing tool calls. `markers` are the token texts that must survive decoding. Texts come
    without the reasoning: a call that the model only thinks about is none."""

    markers: tuple[str, ...]
    supports_tools: bool

    def parse(self, text: str) -> SampledAnswer:
        """Never raises. Content is what was sampled up to the first call, but for the space before that."""

    def certain(self, text: str) -> Certain:
        """Of a part of an answer that goes on, what `parse` will say is content whatever follows."""

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The part of a system message that tells the model its tools."""

    def write_call(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """A call in history as the model would have written it."""

    def write_result(self, content: str) -> str:
        """A tool's result as the text of a user message."""


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes, Qwen2.5 and Qwen3."""

    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")
    supports_tools = True

    def parse(self, text: str) -> SampledAnswer:
        calls: list[SampledCall] = []
        kept: list[str] = []
        malformed = 0
        at = done = 0
        while (start := text.find("<tool_call>", at)) >= 0:
            call, end = _parse_block(text, start)
            if call is None:
                malformed += 1
            else:
                calls.append(call)
                kept.append(text[done:start])
                done = end
            at = end
        kept.append(text[done:])
        if not calls:
            return SampledAnswer(text, (), malformed)
        # The first as it was sampled: it may have been told before anybody knew that a call follows.
        pieces = (kept[0].rstrip(), *(piece.strip() for piece in kept[1:]))
        content = "\n".join(piece for piece in pieces if piece)
        return SampledAnswer(content, tuple(calls), malformed)

    def certain(self, text: str) -> Certain:
        return before_marker(text, "<tool_call>")

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{signatures}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )

    def write_call(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def write_result(self, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"


class Plain:
    """No tools at all."""

    markers: tuple[str, ...] = ()
    supports_tools = False

    def parse(self, text: str) -> SampledAnswer:
        return SampledAnswer(text, (), 0)

    def certain(self, text: str) -> Certain:
        return Certain(len(text), ends=False)

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        return ""

    def write_call(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)

    def write_result(self, content: str) -> str:
        return content


TOOL_FORMATS: Mapping[str, ToolFormat] = {"hermes": Hermes(), "plain": Plain()}


def _parse_block(text: str, start: int) -> tuple[SampledCall | None, int]:
    """The call whose opening tag is at `start`, None where it is malformed, and where to go on."""
    opened = start + len("<tool_call>")
    body = _skip_space(text, opened)
    try:
        # Finds where the JSON ends, so that a closing tag inside a string does not cut it.
        _, end = _JSON.raw_decode(text, body)
    except (ValueError, RecursionError):
        return None, _after_closing_tag(text, opened)
    closing = _skip_space(text, end)
    if not text.startswith("</tool_call>", closing):
        return None, _after_closing_tag(text, end)
    after = closing + len("</tool_call>")
    call = _decode_call(text[body:end])
    if call is None:
        return None, after
    return SampledCall(call.name, call.arguments, text[start:after]), after


class _CallBody(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


def _decode_call(body: str) -> _CallBody | None:
    try:
        call = msgspec.json.decode(body.encode(), type=_CallBody)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return call if call.name and _depth(call.arguments, _MAX_DEPTH) <= _MAX_DEPTH else None


def _depth(value: Any, limit: int) -> int:
    """How deep a JSON value is nested; `limit` + 1 or more where it exceeds that."""
    if limit < 0 or not isinstance(value, (dict, list)):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, limit - 1) for item in items), default=0)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _after_closing_tag(text: str, at: int) -> int:
    """Past a malformed block, but not past the next call's opening tag."""
    closing = text.find("</tool_call>", at)
    opening = text.find("<tool_call>", at)
    if opening >= 0 and (closing < 0 or opening < closing):
        return opening
    return len(text) if closing < 0 else closing + len("</tool_call>")
