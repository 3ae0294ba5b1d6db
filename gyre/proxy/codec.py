"""Tokens in, tokens out: conversations become token ids and sampled ids become answers.

Sampled ids are never decoded and encoded again: a conversation that goes on is the ids it had, plus the
encoding of what is new, rendered behind a dummy answer and cut off it."""

from __future__ import annotations

import json
import secrets
from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from gyre.proxy.conversation import Message, ToolCall, wire_id
from gyre.proxy.live import LiveAnswer, LiveText
from gyre.proxy.reasoning import CLOSE, OPEN, split_reasoning
from gyre.proxy.template import TemplateUnusable, load_chat_template, read_tokenizer_config, token_text
from gyre.proxy.tool_formats import TOOL_FORMATS, SampledAnswer, ToolFormat


class ToolFormatUnknown(ValueError):
    """`harness.proxy.tool_format` names no format."""

    def __init__(self, name: str) -> None:
        allowed = ", ".join(sorted(TOOL_FORMATS))
        super().__init__(f"harness.proxy.tool_format = {name!r} is not known; allowed: {allowed}")
        self.name = name


class DecodedAnswer(NamedTuple):
    """Sampled ids as a message. `raw_calls` maps minted call ids to the text that was sampled. `parsed` and
    `malformed` count its tool calls; of those that are malformed some are in the message too."""

    message: Message
    raw_calls: dict[str, str]
    parsed: int
    malformed: int
    reasoning_tokens: int = 0


class Codec:
    """For one tokenizer's folder (`tokenizer.json`, a chat template) and one way of writing tool calls.

    `end_of_turn` is the id that ends an assistant's turn; `stop_token_ids` are it and the other ids
    on which the model stops."""

    def __init__(self, tokenizer_folder: Path, tool_format: str = "hermes") -> None:
        if tool_format not in TOOL_FORMATS:
            raise ToolFormatUnknown(tool_format)
        self.tool_format = tool_format
        self._format: ToolFormat = TOOL_FORMATS[tool_format]
        self._tokenizer = _load_tokenizer(tokenizer_folder)
        self._template = load_chat_template(tokenizer_folder)
        self._hidden = self._hidden_ids()
        # Random, so that no harness can write it into its own messages.
        self._dummy_answer = f"dummy{secrets.token_hex(8)}answer"
        self._dummy = (
            Message(role="user", content=("x",)),
            Message(role="assistant", content=(self._dummy_answer,)),
        )
        eos_ids = self._eos_ids(tokenizer_folder)
        self.end_of_turn = self._find_end_of_turn(tokenizer_folder, eos_ids)
        self.stop_token_ids = tuple(sorted({self.end_of_turn, *eos_ids}))
        prompt = self._render(self._dummy[:1], (), generation_prompt=True)
        self._opens_reasoning = prompt.rstrip().endswith(OPEN)

    @property
    def supports_tools(self) -> bool:
        return self._format.supports_tools

    def encode_root(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """A whole conversation, ready for an answer. Raises TemplateRefused."""
        return self._encode(self._render(messages, tools, generation_prompt=True))

    def encode_continuation(
        self, parent_path_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """What `new_messages` add to a path that ends with a sampled answer, ready for the next. Ends that
        turn where the answer did not (it met a length limit). Raises TemplateRefused."""
        text = self._render((*self._dummy, *new_messages), tools, generation_prompt=True)
        ids = self._encode(_after(text, self._dummy_answer))
        turn_ended = bool(parent_path_ids) and parent_path_ids[-1] == self.end_of_turn
        if ids and ids[0] == self.end_of_turn:
            return ids[1:] if turn_ended else ids
        return ids if turn_ended else [self.end_of_turn, *ids]

    def decode_answer(
        self,
        output_ids: Sequence[int],
        call: str,
        *,
        parse_tools: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> DecodedAnswer:
        """Sampled ids as text and tool calls, whose ids are minted from `call`, the call's id. `tools` are
        those that were offered."""
        thought = split_reasoning(self.decode_text(output_ids), opened=self._opens_reasoning)
        answer = SampledAnswer(thought.answer, (), 0)
        if parse_tools:
            answer = self._format.parse(thought.answer, tools)
        calls: list[ToolCall] = []
        raw_calls: dict[str, str] = {}
        for index, sampled in enumerate(answer.calls):
            minted = mint_tool_call_id(call, index)
            calls.append(ToolCall(id=minted, name=sampled.name, arguments=sampled.arguments, raw=sampled.raw))
            raw_calls[minted] = sampled.raw
        message = Message(
            role="assistant",
            content=(answer.content,) if answer.content else (),
            tool_calls=tuple(calls),
            reasoning=thought.reasoning,
        )
        reasoning_tokens = 0 if thought.reasoning is None else self.reasoning_tokens(output_ids)
        return DecodedAnswer(message, raw_calls, answer.parsed, answer.malformed, reasoning_tokens)

    def live(self, *, parse_tools: bool = True) -> LiveAnswer:
        """For one answer, told while it is sampled: beginnings of what `decode_answer` says in the end."""
        certain = self._format.certain if parse_tools else None
        text = LiveText(self.decode_text, self._hidden)
        return LiveAnswer(text, opened=self._opens_reasoning, certain=certain)

    def decode_text(self, output_ids: Sequence[int]) -> str:
        """Without special tokens; those that write tool calls stay."""
        return self._tokenizer.decode(
            [token for token in output_ids if token not in self._hidden], skip_special_tokens=False
        )

    def reasoning_tokens(self, output_ids: Sequence[int]) -> int:
        """How many there are up to the closing tag; all where it is not reached."""
        closing = self._tokenizer.token_to_id(CLOSE)
        if closing is not None and closing in output_ids:
            return output_ids.index(closing) + 1
        ends = range(len(output_ids))
        return bisect_left(ends, True, key=lambda end: CLOSE in self.decode_text(output_ids[:end]))

    def _encode(self, text: str) -> list[int]:
        # Unlike `encode` it lets other threads run meanwhile, the event loop among them.
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation_prompt: bool
    ) -> str:
        if not self._template.shows_later_systems:
            messages = _systems_first(messages)
        if self._template.supports_tools:
            shown = [self._native(message) for message in messages]
            return self._template.render(shown, tools, generation_prompt=generation_prompt)
        shown = self._without_tool_roles(messages, tools)
        return self._template.render(shown, (), generation_prompt=generation_prompt)

    def _without_tool_roles(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """For templates that know only system, user and assistant."""
        shown: list[dict[str, Any]] = []
        results_open = False
        for message in messages:
            content = message.text
            if message.role == "tool":
                content = self._format.write_result(content)
                if results_open:
                    shown[-1]["content"] += "\n" + content
                    continue
            elif message.tool_calls:
                content = self._with_calls(content, message.tool_calls)
            results_open = message.role == "tool"
            shown.append({"role": "user" if results_open else message.role, "content": content})
        return self._with_described(shown, tools) if tools else shown

    def _with_calls(self, content: str, calls: Sequence[ToolCall]) -> str:
        """As the model wrote it, malformed ones too."""
        as_sampled = [call.raw for call in calls if call.raw is not None]
        written = "\n".join(raw for raw in as_sampled if raw)
        if len(as_sampled) < len(calls):
            written = self._format.write_calls([(call.name, call.arguments) for call in calls])
        return f"{content}\n{written}" if content else written

    def _native(self, message: Message) -> dict[str, Any]:
        """As chat templates expect it: arguments as objects. A template that is given text for them may
        refuse it, or write it as an object's: such calls are shown as text."""
        malformed = [call for call in message.tool_calls if isinstance(call.arguments, str)]
        content = self._with_calls(message.text, malformed) if malformed else message.text
        shown: dict[str, Any] = {"role": message.role, "content": content}
        if calls := [call for call in message.tool_calls if call not in malformed]:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        if message.tool_call_id is not None:
            shown["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            shown["name"] = message.name
        if message.reasoning is not None:
            shown["reasoning_content"] = message.reasoning
        return shown

    def _with_described(
        self, shown: list[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        described = self._format.describe(tools)
        if shown and shown[0]["role"] == "system":
            described = f"{shown[0]['content']}\n\n{described}" if shown[0]["content"] else described
            shown = shown[1:]
        return [{"role": "system", "content": described}, *shown]

    def _hidden_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(
            token
            for token, entry in added.items()
            if entry.special and entry.content not in (*self._format.markers, OPEN, CLOSE)
        )

    def _eos_ids(self, folder: Path) -> set[int]:
        found: set[int] = set()
        text = token_text(read_tokenizer_config(folder).get("eos_token"))
        if text is not None and (token := self._tokenizer.token_to_id(text)) is not None:
            found.add(token)
        return found | _generation_eos_ids(folder)

    def _find_end_of_turn(self, folder: Path, eos_ids: set[int]) -> int:
        """The special token behind an answer in the template; where it has none, the tokenizer's eos."""
        text = self._render(self._dummy, (), generation_prompt=False)
        if self._dummy_answer not in text:
            raise TemplateUnusable(folder, "its chat template does not show what the assistant said")
        ids = self._encode(_after(text, self._dummy_answer))
        if ids and (ids[0] in self._hidden or ids[0] in eos_ids):
            return ids[0]
        if not eos_ids:
            raise TemplateUnusable(folder, "neither its chat template nor eos_token ends an assistant's turn")
        return min(eos_ids)


def mint_tool_call_id(call: str, index: int) -> str:
    """Names execution and call, in the characters that all APIs allow in ids."""
    return f"call_{wire_id(call)}_{index}"


def _after(text: str, mark: str) -> str:
    return text[text.index(mark) + len(mark) :]


def _systems_first(messages: Sequence[Message]) -> list[Message]:
    """For templates that know one system message, the first: those behind it are added to it, and what the
    system says later the user says."""
    leading = list(takewhile(lambda message: message.role == "system", messages))
    later = [
        msgspec.structs.replace(message, role="user") if message.role == "system" else message
        for message in messages[len(leading) :]
    ]
    if len(leading) > 1:
        blocks = tuple(block for message in leading for block in message.content)
        leading = [Message(role="system", content=blocks)]
    return leading + later


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TemplateUnusable(folder, "no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise TemplateUnusable(folder, f"tokenizer.json cannot be read: {error}") from error


def _generation_eos_ids(folder: Path) -> set[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return set()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TemplateUnusable(folder, f"generation_config.json is not JSON: {error}") from error
    entry = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = entry if isinstance(entry, list) else [entry]
    return {token for token in ids if isinstance(token, int)}
