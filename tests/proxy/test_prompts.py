from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from gyre.proxy.codec import Codec
from gyre.proxy.conversation import Conversation, Message, ToolCall
from gyre.proxy.matching import ConversationIndex
from gyre.proxy.prompts import Prompt, encode_prompt

LONG = "some words of a file that is written\n" * 2_000
USER = Message(role="user", content=("go on",))
DONE = Message(role="assistant", content=("done",))
SMALL: dict[str, Any] = {"type": "function", "function": {"name": "write", "parameters": {}}}
LARGE: dict[str, Any] = {"type": "function", "function": {"name": "write", "description": LONG}}


class Pool(ThreadPoolExecutor):
    """Where a loop sends what would hold it up: counts what it was sent."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.sent = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.sent += 1
        return super().submit(fn, *args, **kwargs)


async def encoded(
    codec: Codec, index: ConversationIndex, *messages: Message, tool: dict[str, Any] = SMALL
) -> tuple[Prompt, bool]:
    """The prompt, and whether it was encoded off the loop."""
    with Pool() as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        conversation = Conversation(messages=messages, tools=(tool,))
        prompt = await encode_prompt(codec, index, conversation, index.digests(conversation))
    return prompt, pool.sent > 0


def called(arguments: dict[str, Any] | str) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="x", name="write", arguments=arguments),))


@pytest.mark.parametrize(
    "new",
    [
        Message(role="user", content=(LONG,)),
        called({"content": LONG}),
        called(LONG),
        Message(role="assistant", content=("ok",), reasoning=LONG),
    ],
)
async def test_whatever_is_long_in_a_message_is_encoded_off_the_loop(codec: Codec, new: Message) -> None:
    assert not (await encoded(codec, ConversationIndex(), USER, DONE, USER))[1]
    assert (await encoded(codec, ConversationIndex(), USER, new, USER))[1]


async def test_large_tools_are_rendered_off_the_loop_at_each_turn(codec: Codec) -> None:
    index = ConversationIndex()
    asked = Conversation(messages=(USER,), tools=(LARGE,))
    root, moved = await encoded(codec, index, USER, tool=LARGE)
    assert moved
    index.add(
        "c0",
        parent=None,
        digest=index.digests(asked)[-1],
        answer=DONE,
        new_input_ids=root.new_ids,
        output_ids=[codec.end_of_turn],
    )
    prompt, moved = await encoded(codec, index, USER, DONE, USER, tool=LARGE)
    assert (prompt.parent, moved) == ("c0", True)
    assert len(prompt.new_ids) < len(json.dumps(LARGE)) / 10


async def longest_gap(codec: Codec) -> float:
    """Between two turns of the loop while a long text is encoded, to the time that this takes."""
    gaps: list[float] = []

    async def watch() -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    began = time.perf_counter()
    await encoded(codec, ConversationIndex(), Message(role="user", content=(LONG,)))
    took = time.perf_counter() - began
    watching.cancel()
    return max(gaps, default=took) / took


async def test_the_loop_goes_on_while_a_long_text_is_encoded(codec: Codec) -> None:
    shares: list[float] = []
    while not shares or shares[-1] >= 0.5:  # at best: a busy machine may hold up the loop too
        assert len(shares) < 30, shares
        shares.append(await longest_gap(codec))
