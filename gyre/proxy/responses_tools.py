"""The tools of OpenAI's Responses: some stand in namespaces, which a policy's template does not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gyre.proxy.api import function_tool
from gyre.proxy.conversation import ToolPlace, bad_request


class Tool(msgspec.Struct):
    """A tool of any type; a namespace has `tools` of its own."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[Tool] | None = None


Offered = tuple[tuple[dict[str, Any], ...], dict[str, ToolPlace]]


def offered_tools(tools: Sequence[Tool]) -> Offered:
    """Those that are functions, and the places of those in namespaces, by the name the policy knows: their
    own, behind the namespace's where the own one is taken. A policy cannot use a vendor's built-in tools."""
    offered: dict[str, dict[str, Any]] = {}
    places: dict[str, ToolPlace] = {}
    for where, namespace, tool in _functions(tools):
        if tool.name is None:
            raise bad_request(f"{where}.name is missing")
        name = tool.name
        if namespace is not None:
            name = name if name not in offered else f"{namespace}__{name}"
            places[name] = ToolPlace(namespace=namespace, name=tool.name)
        offered[name] = function_tool(name, tool.description, tool.parameters)
    return tuple(offered.values()), places


def known_name(name: str, namespace: str | None, places: Mapping[str, ToolPlace]) -> str:
    """How the policy knows a tool that a call in history names."""
    if namespace is not None:
        for known, place in places.items():
            if (place.namespace, place.name) == (namespace, name):
                return known
    return name


def _functions(tools: Sequence[Tool]) -> Iterator[tuple[str, str | None, Tool]]:
    """With place and namespace; those in none first, so that they keep their names."""
    for index, tool in enumerate(tools):
        if tool.type == "function":
            yield f"tools[{index}]", None, tool
    for index, tool in enumerate(tools):
        if tool.type != "namespace":
            continue
        if tool.name is None:
            raise bad_request(f"tools[{index}].name is missing")
        for inner, function in enumerate(tool.tools or []):
            if function.type == "function":
                yield f"tools[{index}].tools[{inner}]", tool.name, function
