"""Where a request belongs in its execution's tree of calls.

Harnesses reformat what they send back (whitespace in arguments, text as lists, new ids), so messages are
compared in a canonical form, and prefixes by the chained digest of it. What an answer's reasoning was is no
part of that: many send none back, and the sampled ids are kept whatever they send."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from gyre.proxy.conversation import (
    CallRequest,
    Conversation,
    Message,
    ToolCall,
    plain_numbers,
    wire_id,
    without_billing,
)
from gyre.proxy.recent import RecentDigests, WarmPaths

_DIGEST_BYTES = 16


class Match(NamedTuple):
    """`node` is the call whose prompt and answer are the request's first `messages` ones; None: a root."""

    node: str | None
    messages: int


class Node(NamedTuple):
    """A recorded call: what it added to its parent's path, and the digest of its path's tokens."""

    parent: str | None
    new_input_ids: array[int]
    output_ids: array[int]
    path_digest: bytes


class ConversationIndex:
    """The recorded calls of one execution. `warm` are paths of all executions."""

    def __init__(self, warm: WarmPaths | None = None) -> None:
        self._warm = warm or WarmPaths()
        self._nodes: dict[str, Node] = {}
        self._by_digest: dict[bytes, list[str]] = {}
        self._sampled_calls: dict[str, ToolCall] = {}
        self._call_of: dict[str, str] = {}
        self._reasoning_of: dict[str, bytes] = {}
        self._recent = RecentDigests()

    def digests(self, conversation: Conversation) -> list[bytes]:
        """One per prefix: of the tools alone, then after each message."""
        begun, chain = self._recent.beginning(conversation)
        if not chain:
            chain = [_digest(b"tools", sorted(_encode(_bare(tool)) for tool in conversation.tools))]
        messages = conversation.messages[len(begun) :]
        for message, following in zip_longest(messages, messages[1:]):
            digest = self._extend(chain[-1], message)
            was_torn = _is_torn(message, following) and digest not in self._by_digest
            chain.append(chain[-1] if was_torn else digest)
        self._recent.keep(conversation.tools, (*begun, *messages), chain)
        return chain

    def match(self, conversation: Conversation, digests: Sequence[bytes]) -> Match:
        """The deepest recorded call that the conversation continues."""
        for length in range(len(conversation.messages), 0, -1):
            if calls := self._by_digest.get(digests[length]):
                return Match(self._choose(calls, conversation.messages[length - 1]), length)
        return Match(None, 0)

    def add(
        self,
        call: str,
        *,
        parent: str | None,
        digest: bytes,
        answer: Message,
        new_input_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """A call was recorded; `digest` is its request's last one."""
        for tool_call in answer.tool_calls:
            self._sampled_calls[tool_call.id] = tool_call
            self._call_of[tool_call.id] = call
        if answer.reasoning is not None:
            self._reasoning_of[call] = _reasoning_digest(answer.reasoning)
        self._by_digest.setdefault(self._extend(digest, answer), []).append(call)
        new, output = array("I", new_input_ids), array("I", output_ids)
        path_digest = _digest(self.prompt_digest(parent, new_input_ids), [output.tobytes()])
        self._nodes[call] = Node(parent, new, output, path_digest)

    def as_sampled(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Tool calls as the policy wrote them, whatever the harness has made of them: known by their ids."""
        return tuple(self._as_sampled(message) for message in messages)

    def _as_sampled(self, message: Message) -> Message:
        if not message.tool_calls:
            return message
        calls = tuple(self._sampled_calls.get(call.id, call) for call in message.tool_calls)
        return msgspec.structs.replace(message, tool_calls=calls)

    def path_ids(self, call: str | None) -> list[int]:
        """Prompt and output of a call, as they were sent and sampled."""
        pieces: list[array[int]] = []
        while call is not None:
            node = self._nodes[call]
            pieces += (node.output_ids, node.new_input_ids)
            call = node.parent
        path: list[int] = []
        for piece in reversed(pieces):
            path.extend(piece)
        return path

    def end_ids(self, call: str) -> Sequence[int]:
        """Of its path the end, with its last token."""
        return self._nodes[call].output_ids or self._nodes[call].new_input_ids

    def prompt_ids(self, parent: str | None, new_input_ids: Sequence[int]) -> tuple[int, ...]:
        """Of a call that goes on from `parent`."""
        if parent is not None and (path := self._warm.path(parent)) is not None:
            prompt, output = path
            return prompt + (output + self._warm.shared(new_input_ids))
        return self._warm.shared((*self.path_ids(parent), *new_input_ids))

    def prompt_digest(self, parent: str | None, new_input_ids: Sequence[int]) -> bytes:
        """Of a prompt's tokens, in time proportional to the new ones."""
        before = self._nodes[parent].path_digest if parent is not None else b"root"
        return _digest(before, [array("I", new_input_ids).tobytes()])

    def _choose(self, calls: Sequence[str], answer: Message) -> str:
        """Several calls were answered alike: ids tell which is meant, or what was thought; else it is the
        last."""
        if len(calls) == 1:
            return calls[0]
        named = {self._call_of.get(tool_call.id) for tool_call in answer.tool_calls}
        reasoning = None if answer.reasoning is None else _reasoning_digest(answer.reasoning)
        for call in reversed(calls):
            if call in named or wire_id(call) == answer.sampled_as:
                return call
        for call in reversed(calls):
            if reasoning is not None and self._reasoning_of.get(call) == reasoning:
                return call
        return calls[-1]

    def _extend(self, previous: bytes, message: Message) -> bytes:
        return _digest(previous, [_encode(self._canonical(message))])

    def _canonical(self, message: Message) -> list[Any]:
        content = message.content
        if message.role == "assistant":
            # Harnesses trim answers.
            content = tuple(text for block in content if (text := block.strip()))
        elif message.role == "system":
            content = without_billing(content)
        calls = self._as_sampled(message).tool_calls
        return [
            message.role,
            content,
            [[call.name, plain_numbers(call.arguments)] for call in calls],
            message.name if message.role in ("system", "user") else None,
        ]


def repetition_key(request: CallRequest, digest: bytes) -> bytes:
    """Equal for two requests that ask the same; `digest` is the conversation's last. How the answer is
    carried (`stream`) does not matter."""
    return _digest(digest, [_encode([request.max_tokens, request.parse_tools, request.hints])])


def draw_seed(job_seed: int, execution: str, prompt_digest: bytes, occurrence: int, refill: int = 0) -> int:
    """The seed of a call's random draws: the same in each attempt of an execution whatever the order of its
    concurrent calls, another for each execution, each refill of it and each time a prompt occurs again."""
    named: list[int | str] = [job_seed, execution, occurrence]
    if refill:
        named.append(refill)
    digest = _digest(prompt_digest, [_encode(named)])
    return int.from_bytes(digest[:8]) >> 1


def _is_torn(message: Message, following: Message | None) -> bool:
    """Whether it is what a broken stream left of the answer that follows: opencode keeps both."""
    return (
        following is not None
        and message.role == following.role == "assistant"
        and not message.tool_calls
        and following.text.strip().startswith(message.text.strip())
    )


def _reasoning_digest(reasoning: str) -> bytes:
    return _digest(b"reasoning", [reasoning.strip().encode()])


def _bare(value: Any) -> Any:
    """A tool without the marks that harnesses move from call to call."""
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items() if key != "cache_control"}
    if isinstance(value, list):
        return [_bare(item) for item in value]
    return value


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _digest(previous: bytes, parts: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(previous, digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()
