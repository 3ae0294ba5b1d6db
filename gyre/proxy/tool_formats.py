"""How policies write tool calls in their text, and how tools are told to those whose template cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gyre.proxy.live import Certain
from gyre.proxy.tool_json import Hermes, Llama, SmolLM2
from gyre.proxy.tool_text import SampledAnswer, SampledCall, ToolFormat, Tools
from gyre.proxy.tool_xml import Qwen3Coder

__all__ = ["TOOL_FORMATS", "Hermes", "SampledAnswer", "SampledCall", "ToolFormat", "looks_like"]


class Plain:
    """No tools at all."""

    markers: tuple[str, ...] = ()
    supports_tools = False

    def parse(self, text: str, tools: Tools = ()) -> SampledAnswer:
        return SampledAnswer(text, (), 0)

    def certain(self, text: str, begun: bool) -> Certain:
        return Certain(len(text), ends=False)

    def describe(self, tools: Tools) -> str:
        return ""

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
        return Hermes().write_calls(calls)

    def write_result(self, content: str) -> str:
        return content


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama": Llama(),
    "smollm2": SmolLM2(),
    "plain": Plain(),
}


def looks_like(text: str, tools: Tools = ()) -> str | None:
    """The format that reads a call in a text, None where none does."""
    found = (name for name, its in TOOL_FORMATS.items() if its.parse(text, tools).parsed)
    return next(found, None)
