"""Tool calls that policies write as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.proxy.live import Certain
from gyre.proxy.tool_text import (
    Block,
    SampledAnswer,
    SampledCall,
    Tools,
    before_markers,
    before_next,
    call_of,
    decoded,
    malformed_call,
    parse_blocks,
    skip_space,
)

_JSON = json.JSONDecoder()
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
# An answer that begins so, and says with what, means to be a call.
_BARE_CALL = re.compile(r'\{\s*"(?:name|type)"')
_WITH = re.compile(r'"(?:parameters|arguments)"\s*:')


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes, Qwen2.5 and Qwen3."""

    markers: tuple[str, ...] = (_OPEN, _CLOSE)
    supports_tools = True

    def parse(self, text: str, tools: Tools = ()) -> SampledAnswer:
        return parse_blocks(text, lambda text, at: text.find(_OPEN, at), self._read)

    def certain(self, text: str, begun: bool) -> Certain:
        return before_markers(text, _OPEN)

    def describe(self, tools: Tools) -> str:
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{signatures(tools)}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
        return "\n".join(f"{_OPEN}\n{_written(name, arguments)}\n{_CLOSE}" for name, arguments in calls)

    def write_result(self, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"

    def _read(self, text: str, start: int) -> Block:
        body = skip_space(text, start + len(_OPEN))
        try:
            # Finds where the JSON ends, so that a closing tag inside a string does not cut it.
            _, end = _JSON.raw_decode(text, body)
        except (ValueError, RecursionError):
            return self._malformed(text, start, body, body)
        closing = skip_space(text, end)
        if not text.startswith(_CLOSE, closing):
            return self._malformed(text, start, body, end)
        after = closing + len(_CLOSE)
        calls = self._calls(text[body:end], text[start:after])
        return Block(calls, 0, after) if calls else self._malformed(text, start, body, end)

    def _calls(self, body: str, raw: str) -> tuple[SampledCall, ...]:
        call = call_of(decoded(body), raw)
        return () if call is None else (call,)

    def _malformed(self, text: str, start: int, body: int, after: int) -> Block:
        ends, end = before_next(text, after, _CLOSE, _OPEN)
        call = malformed_call(text[body:ends], text[start:end])
        return Block(() if call is None else (call,), 1, end)


class SmolLM2(Hermes):
    """`<tool_call>[{"name": ..., "arguments": {...}}, ...]</tool_call>`: all calls of an answer in one."""

    def describe(self, tools: Tools) -> str:
        return (
            "You may call functions to answer the user's question. They are:\n"
            f"<tools>[{', '.join(json.dumps(tool, ensure_ascii=False) for tool in tools)}]</tools>\n\n"
            "To call functions, answer with a list of all calls:\n"
            '<tool_call>[{"name": <function-name>, "arguments": <args-json-object>}, ...]</tool_call>'
        )

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
        return f"{_OPEN}[{', '.join(_written(name, arguments) for name, arguments in calls)}]{_CLOSE}"

    def _calls(self, body: str, raw: str) -> tuple[SampledCall, ...]:
        value = decoded(body)
        if not isinstance(value, list):
            return super()._calls(body, raw)
        # The text that they were parsed from is that of all of them.
        found = [call_of(item, raw if index == 0 else "") for index, item in enumerate(value)]
        calls = tuple(call for call in found if call is not None)
        return calls if len(calls) == len(found) else ()


class Llama:
    """`{"name": ..., "parameters": {...}}`, several with `;` between, of Llama 3: at the beginning of an
    answer, or behind its tag."""

    markers: tuple[str, ...] = (_PYTHON_TAG,)
    supports_tools = True

    def parse(self, text: str, tools: Tools = ()) -> SampledAnswer:
        return parse_blocks(text, self._find, self._read)

    def certain(self, text: str, begun: bool) -> Certain:
        if not begun and text.lstrip()[:1] in ("", "{"):
            return Certain(0, bool(text.strip()))
        return before_markers(text, _PYTHON_TAG)

    def describe(self, tools: Tools) -> str:
        return (
            "Given the following functions, please respond with a JSON for a function call with its proper "
            "arguments that best answers the given prompt.\n\n"
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
            f"value}}. Do not use variables.\n\n{signatures(tools)}"
        )

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
        return "; ".join(_written(name, arguments, "parameters") for name, arguments in calls)

    def write_result(self, content: str) -> str:
        return content

    def _find(self, text: str, at: int) -> int:
        start = skip_space(text, 0)
        if at == 0 and _BARE_CALL.match(text, start) and _WITH.search(text):
            return start
        return text.find(_PYTHON_TAG, at)

    def _read(self, text: str, start: int) -> Block:
        calls: list[SampledCall] = []
        at = start
        while True:
            raw_start = at
            at = skip_space(text, at)
            if text.startswith(_PYTHON_TAG, at):
                at = skip_space(text, at + len(_PYTHON_TAG))
            try:
                _, end = _JSON.raw_decode(text, at)
            except (ValueError, RecursionError):
                break
            call = call_of(decoded(text[at:end]), text[raw_start:end])
            if call is None:
                break
            calls.append(call)
            following = skip_space(text, end)
            if text[following : following + 1] == ";":
                at = following + 1
            elif text.startswith(("{", _PYTHON_TAG), following):
                at = following
            else:
                return Block(tuple(calls), 0, end)
        end = text.find(_PYTHON_TAG, at)
        end = len(text) if end < 0 else end
        if broken := malformed_call(text[at:end], text[raw_start:end]):
            return Block((*calls, broken), 1, end)
        # What follows a call, and is none, is content.
        return Block(tuple(calls), 0, raw_start) if calls else Block((), 1, max(end, start + 1))


def signatures(tools: Tools) -> str:
    """One a line."""
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def _written(name: str, arguments: Mapping[str, Any] | str, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)
