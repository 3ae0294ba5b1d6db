"""What was worked out of a conversation, kept for its next call: a harness sends all of it with each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from gyre.proxy.conversation import Conversation, Message

# Of one execution those that go on at the same time, mostly: its own and its sub-agents'.
_CONVERSATIONS = 4
# Eight bytes each.
_WARM_TOKENS = 8_000_000

_encode = msgspec.json.encode


class _Digested(NamedTuple):
    tools: bytes
    messages: tuple[Message, ...]
    chain: list[bytes]


class RecentDigests:
    """Of the conversations that an execution was last asked to go on with: to compare messages is many times
    cheaper than to digest them."""

    def __init__(self) -> None:
        self._digested: list[_Digested] = []

    def beginning(self, conversation: Conversation) -> tuple[tuple[Message, ...], list[bytes]]:
        """Messages that it begins with too, and their digests, that of the tools first; none where no
        conversation with these tools is known. The last one that is shared is left out, because what follows
        a message may count."""
        best: _Digested | None = None
        most = 0
        tools = _encode(conversation.tools)
        for digested in self._digested:
            if digested.tools == tools:
                pairs = map(_same, digested.messages, conversation.messages)
                shared = max(1, sum(takewhile(bool, pairs)))
                if shared > most:
                    best, most = digested, shared
        if best is None:
            return (), []
        return best.messages[: most - 1], best.chain[:most]

    def keep(
        self, tools: tuple[dict[str, Any], ...], messages: tuple[Message, ...], chain: list[bytes]
    ) -> None:
        """In place of what it goes on from."""
        others = [digested for digested in self._digested if digested.chain != chain[: len(digested.chain)]]
        self._digested = [_Digested(_encode(tools), messages, chain), *others[: _CONVERSATIONS - 1]]


def _same(one: Message, other: Message) -> bool:
    """In the types of its numbers too: for Python true, 1 and 1.0 are equal."""
    return one == other and (not one.tool_calls or _encode(one.tool_calls) == _encode(other.tool_calls))


class WarmPaths:
    """Prompts and answers of the calls that were last recorded, as an engine is sent them."""

    def __init__(self, most_tokens: int = _WARM_TOKENS) -> None:
        self._paths: OrderedDict[str, tuple[tuple[int, ...], tuple[int, ...]]] = OrderedDict()
        self._room = most_tokens
        self._ids: dict[int, int] = {}

    def shared(self, ids: Iterable[int]) -> tuple[int, ...]:
        """The same as objects of which there is one for each token that is known, and not for each that is
        said: to send them is faster too."""
        known = self._ids.setdefault
        return tuple([known(token, token) for token in ids])

    def keep(self, call: str, parent: str | None, prompt: tuple[int, ...], output: Sequence[int]) -> None:
        """In place of its parent's, which it begins with."""
        if parent is not None:
            self._drop(parent)
        self._paths[call] = prompt, self.shared(output)
        self._room -= len(prompt) + len(output)
        while self._room < 0:
            self._drop(next(iter(self._paths)))

    def path(self, call: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """A prompt and its answer, if they are warm."""
        return self._paths.get(call)

    def _drop(self, call: str) -> None:
        if (path := self._paths.pop(call, None)) is not None:
            self._room += len(path[0]) + len(path[1])
