"""Tool calls that policies write as tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.proxy.live import Certain
from gyre.proxy.tool_json import signatures
from gyre.proxy.tool_text import (
    MAX_DEPTH,
    Block,
    SampledAnswer,
    SampledCall,
    Tools,
    before_markers,
    before_next,
    decoded,
    depth,
    is_object,
    parse_blocks,
    skip_space,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END = "<function=", "</function>"
_PARAMETER = "<parameter="
_START = re.compile(r"<tool_call>|<function=")
_TAG_NAME = re.compile(r"([^<>\s]{1,256})>")
# A value may hold tags: it ends where another one, or the function's end, follows.
_VALUE_END = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")
# As its model's own parser has it, the closing tag may be missing.
_OPEN_VALUE_END = re.compile(r"\n?(?=<parameter=|</function>)")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class Qwen3Coder:
    """`<tool_call><function=NAME><parameter=NAME>value</parameter></function></tool_call>`, of Qwen3-Coder
    and Qwen3.5. Values have no quotes: what they are is what the tool's schema says. The model leaves the tag
    around a function out now and then: one of an offered tool is a call all the same."""

    markers: tuple[str, ...] = (_OPEN, _CLOSE)
    supports_tools = True

    def parse(self, text: str, tools: Tools = ()) -> SampledAnswer:
        schemas = _schemas(tools)

        def find(text: str, at: int) -> int:
            found = _START.search(text, at)
            return -1 if found is None else found.start()

        return parse_blocks(text, find, lambda text, start: _read(text, start, schemas))

    def certain(self, text: str, begun: bool) -> Certain:
        return before_markers(text, _OPEN, _FUNCTION)

    def describe(self, tools: Tools) -> str:
        return (
            "# Tools\n\nYou have access to the following functions:\n\n"
            f"<tools>\n{signatures(tools)}\n</tools>\n\n"
            "If you choose to call a function, reply in the following format with no suffix:\n\n"
            "<tool_call>\n<function=example_function>\n<parameter=example_parameter>\nvalue\n</parameter>\n"
            "</function>\n</tool_call>"
        )

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
        return "\n".join(
            f"{_OPEN}\n{_FUNCTION}{name}>\n{_written(arguments)}{_END}\n{_CLOSE}" for name, arguments in calls
        )

    def write_result(self, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"


def _read(text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]) -> Block:
    at = start
    is_open = text.startswith(_OPEN, at)
    if is_open:
        at = skip_space(text, at + len(_OPEN))
    named = _TAG_NAME.match(text, at + len(_FUNCTION)) if text.startswith(_FUNCTION, at) else None
    if not is_open and (named is None or named[1] not in schemas):
        # A text about functions.
        return Block((), 0, start + len(_FUNCTION))
    if named is None:
        return Block((), 1, before_next(text, max(at, start + 1), _CLOSE, _OPEN)[1])
    values, end = _values(text, named.end())
    if values is None:
        ends, after = before_next(text, named.end(), _CLOSE, _OPEN)
        # Its text could be an object by chance; then it is shown with the tag before it.
        body = text[named.end() : ends].strip()
        body = text[at:ends].strip() if not body or is_object(body) else body
        return Block((SampledCall(named[1], body, text[start:after]),), 1, after)
    closing = skip_space(text, end)
    if text.startswith(_CLOSE, closing):
        end = closing + len(_CLOSE)
    schema = schemas.get(named[1], {})
    arguments = {name: _typed(value, schema.get(name)) for name, value in values.items()}
    return Block((SampledCall(named[1], arguments, text[start:end]),), 0, end)


def _values(text: str, at: int) -> tuple[dict[str, str] | None, int]:
    """Of the parameters from `at` on, and where the function ends; None where it is not as it should be."""
    values: dict[str, str] = {}
    closes = True
    while not text.startswith(_END, at := skip_space(text, at)):
        named = _TAG_NAME.match(text, at + len(_PARAMETER)) if text.startswith(_PARAMETER, at) else None
        if named is None:
            return None, at
        begin = named.end() + text.startswith("\n", named.end())
        # Where none was found from an earlier place on there is none.
        ends = _VALUE_END.search(text, max(begin - 1, named.end())) if closes else None
        closes = ends is not None
        ends = ends or _OPEN_VALUE_END.search(text, max(begin - 1, named.end()))
        if ends is None:
            return None, at
        values[named[1]] = text[begin : ends.start()]
        at = ends.end()
    return values, at + len(_END)


def _typed(value: str, schema: Any) -> Any:
    """As the schema wants it; as text where it is no such value, which the harness then refuses."""
    kinds = _kinds(schema)
    if "string" in kinds and not (value == "null" and "null" in kinds):
        return value
    read = decoded(value.strip().lower() if "boolean" in kinds and len(value) < 16 else value)
    wanted = tuple(kind for name in kinds for kind in _KINDS.get(name, ()))
    if read is None:
        return None if value.strip() == "null" and type(None) in wanted else value
    if isinstance(read, bool) and bool not in wanted:
        return value
    return read if isinstance(read, wanted) and depth(read) <= MAX_DEPTH else value


def _kinds(schema: Any) -> set[str]:
    """JSON types that a schema allows; text where it does not say."""
    if not isinstance(schema, Mapping):
        return {"string"}
    found: set[str] = set()
    for option in (schema, *_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        if isinstance(option, Mapping):
            named = option.get("type")
            found |= {kind for kind in (*_listed(named), named) if isinstance(kind, str)}
    return found or {"string"}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _schemas(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """The schemas of each tool's parameters."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found[str(function.get("name"))] = properties if isinstance(properties, Mapping) else {}
    return found


def _written(arguments: Mapping[str, Any] | str) -> str:
    if isinstance(arguments, str):
        return f"{arguments}\n"
    return "".join(
        f"{_PARAMETER}{name}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"
        "</parameter>\n"
        for name, value in arguments.items()
    )
