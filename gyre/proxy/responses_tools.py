"""The tools of OpenAI's Responses: some stand in namespaces, which a policy's template does not know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
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
# A namespace, or none, and a name in it.
_Own = tuple[str | None, str]


def offered_tools(tools: Sequence[Tool]) -> Offered:
    """Those that are functions, and the places of those in namespaces, by the name the policy knows: their
    own, behind the namespace's where another has it too. A policy cannot use a vendor's built-in tools."""
    functions = [((namespace, _name(where, tool)), tool) for where, namespace, tool in _functions(tools)]
    names = _known_names({own for own, _ in functions})
    offered: dict[str, dict[str, Any]] = {}
    for own, tool in functions:
        offered.setdefault(names[own], function_tool(names[own], tool.description, tool.parameters))
    places = {
        known: ToolPlace(namespace=namespace, name=name)
        for (namespace, name), known in names.items()
        if namespace is not None
    }
    return tuple(offered.values()), places


def known_name(name: str, namespace: str | None, places: Mapping[str, ToolPlace]) -> str:
    """How the policy knows a tool that a call in history names."""
    if namespace is not None:
        for known, place in places.items():
            if (place.namespace, place.name) == (namespace, name):
                return known
    return name


def _known_names(tools: Set[_Own]) -> dict[_Own, str]:
    """Whatever the order that they are offered in: clients do not keep it."""
    known: dict[_Own, str] = {(None, name): name for namespace, name in tools if namespace is None}
    taken = set(known.values())
    shared = Counter(name for _, name in tools)
    for namespace, name in sorted((namespace, name) for namespace, name in tools if namespace is not None):
        chosen = name if shared[name] == 1 else f"{namespace}__{name}"
        while chosen in taken:
            chosen += "_"
        taken.add(chosen)
        known[namespace, name] = chosen
    return known


def _name(where: str, tool: Tool) -> str:
    if tool.name is None:
        raise bad_request(f"{where}.name is missing")
    return tool.name


def _functions(tools: Sequence[Tool]) -> Iterator[tuple[str, str | None, Tool]]:
    """With place and namespace; those in none first."""
    for index, tool in enumerate(tools):
        if tool.type == "function":
            yield f"tools[{index}]", None, tool
    for index, tool in enumerate(tools):
        if tool.type != "namespace":
            continue
        namespace = _name(f"tools[{index}]", tool)
        for inner, function in enumerate(tool.tools or []):
            if function.type == "function":
                yield f"tools[{index}].tools[{inner}]", namespace, function
