"""The tokens of a request: those of the path that it goes on, and the encoding of what is new."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gyre.proxy.codec import Codec
from gyre.proxy.conversation import Conversation, Message, bad_request
from gyre.proxy.matching import ConversationIndex
from gyre.proxy.template import TemplateRefused

# Encoding more than this is moved off the event loop, which all calls share.
_ENCODE_INLINE_CHARACTERS = 32_768


class Prompt(NamedTuple):
    """`parent` is the call whose path is the beginning of `ids`; `new_ids` encode `new_messages`."""

    parent: str | None
    new_messages: tuple[Message, ...]
    new_ids: list[int]
    ids: tuple[int, ...]


async def encode_prompt(
    codec: Codec, index: ConversationIndex, conversation: Conversation, digests: Sequence[bytes]
) -> Prompt:
    """Only what is new is encoded. Raises CallError."""
    if conversation.tools and not codec.supports_tools:
        raise bad_request('this job\'s policy has no tools: harness.proxy.tool_format is "plain"')
    match = index.match(conversation, digests)
    new = conversation.messages[match.messages :]
    # A template renders the tools at each turn, though only the first shows them.
    characters = len(msgspec.json.encode(conversation.tools)) + sum(map(_characters, new))

    def encode() -> list[int]:
        sampled = index.as_sampled(new)
        if match.node is None:
            return codec.encode_root(sampled, conversation.tools)
        return codec.encode_continuation(index.end_ids(match.node), sampled, conversation.tools)

    try:
        inline = characters <= _ENCODE_INLINE_CHARACTERS
        new_ids = encode() if inline else await asyncio.to_thread(encode)
    except TemplateRefused as error:
        raise bad_request(str(error)) from error
    return Prompt(match.node, new, new_ids, index.prompt_ids(match.node, new_ids))


def _characters(message: Message) -> int:
    """What a template may show of it."""
    arguments = sum(len(call.arguments_json) for call in message.tool_calls)
    return len(message.text) + len(message.reasoning or "") + arguments
