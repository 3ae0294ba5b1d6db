"""Tool calls in sampled text: what is found of them, whatever way a policy writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from gyre.proxy.live import Certain, before_part_of

Tools = Sequence[Mapping[str, Any]]
# Deeper arguments would break recursive encoders later on; no tool has such.
MAX_DEPTH = 64

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,256})"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


class SampledCall(NamedTuple):
    """A tool call in sampled text; `raw` is the text it was parsed from. `arguments` are text where the call
    is malformed, as they were sampled, and no JSON object: harnesses show such to the model as its fault."""

    name: str
    arguments: dict[str, Any] | str
    raw: str


class SampledAnswer(NamedTuple):
    """Sampled text, parsed. `content` is what is no call. Of `malformed` ones those that say which tool they
    mean are among the calls; others are content as they were sampled."""

    content: str
    calls: tuple[SampledCall, ...]
    malformed: int

    @property
    def parsed(self) -> int:
        """Well-formed calls."""
        return sum(not isinstance(call.arguments, str) for call in self.calls)


class Block(NamedTuple):
    """What is found between the start of a call and `end`; without calls it is content."""

    calls: tuple[SampledCall, ...]
    malformed: int
    end: int


class ToolFormat(Protocol):
    """One way of writing tool calls. `markers` are the token texts that must survive decoding. Texts come
    without the reasoning: a call that the model only thinks about is none."""

    markers: tuple[str, ...]
    supports_tools: bool

    def parse(self, text: str, tools: Tools = ()) -> SampledAnswer:
        """Never raises. Content is what was sampled up to the first call, but for the space before that.
        `tools` are those offered."""

    def certain(self, text: str, begun: bool) -> Certain:
        """Of a part of an answer that goes on, what `parse` will say is content whatever follows. `begun`:
        some was before that part."""

    def describe(self, tools: Tools) -> str:
        """The part of a system message that tells the model its tools."""

    def write_calls(self, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
        """Calls (name, arguments) in history as the model would have written them."""

    def write_result(self, content: str) -> str:
        """A tool's result as the text of a user message."""


def parse_blocks(
    text: str, find: Callable[[str, int], int], read: Callable[[str, int], Block]
) -> SampledAnswer:
    """`find` says where the next block begins, -1 for nowhere; `read` what is in it."""
    calls: list[SampledCall] = []
    kept: list[str] = []
    malformed = 0
    at = done = 0
    while (start := find(text, at)) >= 0:
        block = read(text, start)
        malformed += block.malformed
        if block.calls:
            calls += block.calls
            kept.append(text[done:start])
            done = block.end
        at = block.end
    kept.append(text[done:])
    if not calls:
        return SampledAnswer(text, (), malformed)
    # The first as it was sampled: it may have been told before anybody knew that a call follows.
    pieces = (kept[0].rstrip(), *(piece.strip() for piece in kept[1:]))
    content = "\n".join(piece for piece in pieces if piece)
    return SampledAnswer(content, tuple(calls), malformed)


def before_markers(text: str, *markers: str) -> Certain:
    """For formats whose calls begin with one of `markers`: content ends before it, and before the space
    there."""
    starts = [start for marker in markers if (start := text.find(marker)) >= 0]
    end = min(starts, default=min(before_part_of(text, marker) for marker in markers))
    return Certain(len(text[:end].rstrip()), bool(starts))


def call_of(value: Any, raw: str) -> SampledCall | None:
    """A well-formed call from its JSON: `arguments`, or as Llama has it `parameters`."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return SampledCall(name, arguments, raw) if depth(arguments) <= MAX_DEPTH else None


def malformed_call(body: str, raw: str) -> SampledCall | None:
    """Of a call that is none in `body` what a harness can show: None where it does not say which tool."""
    name, key = _NAME.search(body), _ARGUMENTS.search(body)
    if name is None or (key is not None and key.start() < name.start()):
        return None
    arguments = body if key is None else body[key.end() :]
    # What is around them may be what is wrong: they must not pass for a whole call.
    shown = (text.strip() for text in (arguments, body, raw))
    found = next((text for text in shown if text and not is_object(text)), None)
    return None if found is None else SampledCall(name[1], found, raw)


def is_object(text: str) -> bool:
    return isinstance(decoded(text), dict)


def decoded(text: str) -> Any:
    """A JSON value, None where the text is none."""
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def depth(value: Any, limit: int = MAX_DEPTH) -> int:
    """How deep a JSON value is nested; `limit` + 1 or more where it exceeds that."""
    if limit < 0 or not isinstance(value, (dict, list)):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max((depth(item, limit - 1) for item in items), default=0)


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def before_next(text: str, at: int, closing: str, opening: str) -> tuple[int, int]:
    """Where a malformed block's body ends and the block: behind its closing tag, but not behind the next
    call's opening one."""
    closes, opens = text.find(closing, at), text.find(opening, at)
    if opens >= 0 and (closes < 0 or opens < closes):
        return opens, opens
    return (len(text), len(text)) if closes < 0 else (closes, closes + len(closing))
