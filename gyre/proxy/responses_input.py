"""The input of OpenAI's Responses: a flat list of items, of which several make one message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gyre.proxy.api import left_out, not_supported, parse_arguments
from gyre.proxy.conversation import Message, MessageRole, ToolCall, ToolPlace, bad_request, is_wire_id
from gyre.proxy.responses_tools import known_name

_ROLES: dict[str, MessageRole] = {"system": "system", "developer": "system", "user": "user"}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


_Content = str | list[_Part] | None


class Item(msgspec.Struct):
    """An item of any type; which fields it has depends on that."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: _Content = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    output: _Content = None

    @property
    def sampled_as(self) -> str | None:
        """The call that an answer's item names, where it is one of ours: the id of a tool call is always
        sent back, while clients leave out those of items or give them new ones."""
        item, call = self.id or "", self.call_id or ""
        if self.type == "function_call":
            names = [call.removeprefix("call_"), item.removeprefix("fc_")]
            names = [name.rpartition("_")[0] for name in names]
        else:
            names = [self.encrypted_content or "", item.removeprefix("rs_").removeprefix("msg_")]
        return next((name for name in names if is_wire_id(name)), None)


class _Answer:
    """An assistant's message as its items come together."""

    def __init__(self, sampled_as: str | None) -> None:
        self.sampled_as = sampled_as
        self.content: tuple[str, ...] = ()
        self.calls: list[ToolCall] = []
        self.thoughts: list[str] = []
        self.spoke = False

    def goes_on_with(self, item: Item, answered: bool) -> bool:
        """Whether an item belongs to this answer too: its id says so, or where one of them has none its
        place does. `answered`: a tool's output stands between."""
        sampled_as = item.sampled_as
        if sampled_as is not None and self.sampled_as is not None:
            return sampled_as == self.sampled_as
        if answered:
            return False
        if item.type == "function_call":
            return True
        return not self.calls and not self.spoke

    def to_message(self) -> Message:
        return Message(
            role="assistant",
            content=self.content,
            tool_calls=tuple(self.calls),
            reasoning="\n".join(self.thoughts) or None,
            sampled_as=self.sampled_as,
        )


def messages_of(items: Sequence[Item], places: Mapping[str, ToolPlace]) -> list[Message]:
    """`places` are those of the tools in namespaces. Raises CallError."""
    parts: list[Message | _Answer] = []
    answer: _Answer | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "function_call_output":
            output = _texts(f"{where}.output", _described(item.output))
            parts.append(Message(role="tool", content=output, tool_call_id=item.call_id or ""))
        elif item.type == "message" and item.role != "assistant":
            answer = None
            parts.append(_message(where, item))
        elif item.type in ("message", "reasoning", "function_call"):
            if answer is None or not answer.goes_on_with(item, parts[-1] is not answer):
                answer = _Answer(item.sampled_as)
                parts.append(answer)
            _add(answer, where, item, places)
        elif item.type == "item_reference":
            raise bad_request(f"{where}: no item is kept here; send the item itself (store = false)")
        else:
            raise not_supported(where, item.type)
    return [part if isinstance(part, Message) else part.to_message() for part in parts]


def _message(where: str, item: Item) -> Message:
    if item.role not in _ROLES:
        raise bad_request(f"{where}.role = {item.role!r} is not supported")
    return Message(role=_ROLES[item.role], content=_texts(f"{where}.content", item.content))


def _add(answer: _Answer, where: str, item: Item, places: Mapping[str, ToolPlace]) -> None:
    answer.sampled_as = answer.sampled_as or item.sampled_as
    if item.type == "reasoning":
        answer.thoughts += _texts(f"{where}.content", item.content) or _texts(
            f"{where}.summary", item.summary
        )
    elif item.type == "message":
        answer.spoke = True
        answer.content += _texts(f"{where}.content", item.content)
    else:
        if item.name is None:
            raise bad_request(f"{where}.name is missing")
        name = known_name(item.name, item.namespace, places)
        arguments = parse_arguments(item.arguments)
        answer.calls.append(ToolCall(id=item.call_id or "", name=name, arguments=arguments))


def _described(output: _Content) -> _Content:
    """A tool's output in text."""
    if output is None or isinstance(output, str):
        return output
    known = (*_TEXTS, "refusal")
    return [
        part if part.type in known else _Part(type="input_text", text=left_out(part.type)) for part in output
    ]


def _texts(place: str, content: _Content) -> tuple[str, ...]:
    if content is None or isinstance(content, str):
        return (content,) if content else ()
    return tuple(_parts(place, content))


def _parts(place: str, parts: Iterable[_Part]) -> list[str]:
    texts: list[str] = []
    for index, part in enumerate(parts):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None or part.type not in (*_TEXTS, "refusal"):
            raise not_supported(f"{place}[{index}]", part.type)
        if text:
            texts.append(text)
    return texts
