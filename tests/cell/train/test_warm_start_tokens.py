"""What the warm start trains on is what the proxy will show the model: the same tokens, cut alike."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gyre.cell.recipes import load_function, model_folder
from gyre.cell.train.warm_start import _encode
from gyre.proxy.codec import Codec
from gyre.proxy.conversation import Message, ToolCall

POLICY = Path(__file__).parents[3] / "examples" / "quickstart" / "policy.py"


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder(f"{POLICY}:write_model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def demos() -> list[dict[str, Any]]:
    return list(itertools.islice(load_function(f"{POLICY}:demos")(), 60))


def as_message(message: dict[str, Any]) -> Message:
    """As the proxy reads it from a request."""
    calls = tuple(
        ToolCall(id="c", name=call["function"]["name"], arguments=json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    )
    content = (message["content"],) if message["content"] else ()
    return Message(role=message["role"], content=content, tool_calls=calls)


def through_the_proxy(
    codec: Codec, demo: dict[str, Any], answers: list[list[int]]
) -> tuple[list[int], list[bool]]:
    """The path of a conversation in which the model samples `answers`, call by call."""
    messages = [as_message(message) for message in demo["messages"]]
    tools = demo["tools"] or []
    path: list[int] = []
    sampled: list[bool] = []
    seen = 0
    spoken = [index for index, message in enumerate(messages) if message.role == "assistant"]
    for index, answer in zip(spoken, answers, strict=True):
        if path:
            new = codec.encode_continuation(path, messages[seen + 1 : index], tools)
        else:
            new = codec.encode_root(messages[:index], tools)
        path += new + answer
        sampled += [False] * len(new) + [True] * len(answer)
        seen = index
    return path, sampled


def runs_of_true(ids: list[int], marks: list[bool]) -> list[list[int]]:
    grouped = itertools.groupby(zip(ids, marks, strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in group] for mark, group in grouped if mark]


def test_the_quickstarts_demonstrations_are_conversations_through_the_proxy(
    folder: Path, tokenizer: PreTrainedTokenizerBase, demos: list[dict[str, Any]]
) -> None:
    codec = Codec(folder)
    for demo in demos:
        ids, spoken = _encode(tokenizer, demo["messages"], demo["tools"])
        answers = runs_of_true(ids, spoken)
        assert (ids, spoken) == through_the_proxy(codec, demo, answers)
        for answer, message in zip(
            answers, [m for m in demo["messages"] if m["role"] == "assistant"], strict=True
        ):
            assert answer[-1] == codec.end_of_turn
            decoded = codec.decode_answer(answer, "c").message
            said = as_message(message)
            assert decoded.content == said.content
            assert [(c.name, c.arguments) for c in decoded.tool_calls] == [
                (c.name, c.arguments) for c in said.tool_calls
            ]


def test_the_demonstrations_show_all_that_the_harness_does(demos: list[dict[str, Any]]) -> None:
    """Else the test above would say little."""
    said = [message for demo in demos for message in demo["messages"] if message["role"] == "assistant"]
    called = {c["function"]["name"] for message in said for c in message.get("tool_calls") or []}
    assert called == {"put", "delegate"}
    assert any(demo["tools"] is None for demo in demos), "a compaction"
    assert any(sum(m["role"] == "assistant" for m in demo["messages"]) > 1 for demo in demos)


def test_what_is_not_said_by_the_assistant_is_not_trained(
    tokenizer: PreTrainedTokenizerBase, demos: list[dict[str, Any]]
) -> None:
    for demo in demos:
        ids, spoken = _encode(tokenizer, demo["messages"], demo["tools"])
        context = tokenizer.decode([token for token, says in zip(ids, spoken, strict=True) if not says])
        assert context.count("<|im_start|>assistant") == len(runs_of_true(ids, spoken))
        assert "<tool_call>" not in context
