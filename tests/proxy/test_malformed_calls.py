"""Malformed tool calls: harnesses get them so that the model learns of its fault, and they are counted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from gyre.proxy.codec import Codec
from gyre.proxy.conversation import CallRequest, Conversation
from gyre.proxy.tool_watch import ALARM_CALLS, ToolWatch
from tests.proxy.house import PUT, USER, House, house
from tests.proxy.talkers import talking

APIS = ("chat", "messages", "responses")
ARGUMENTS = '{"folder": "da'
BROKEN = '<tool_call>{"name": "put", "arguments": {"folder": "da</tool_call><|im_end|>'
CODER = "<tool_call><function=put>\n<parameter=folder>\ndata\n</parameter>\n</function></tool_call>"


@pytest.fixture
async def one(chatml_folder: Path, tmp_path: Path) -> AsyncIterator[House]:
    async with house(chatml_folder, tmp_path) as built:
        yield built


def breaks_its_first_call(one: House) -> None:
    one.script.answer = lambda prompt: "I see.<|im_end|>" if "tool_response" in prompt else BROKEN


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
async def test_a_broken_call_is_a_call_with_what_was_sampled_and_its_turn_goes_on(
    chatml_folder: Path, tmp_path: Path, api: str, stream: bool
) -> None:
    """A quarter of all rollouts died of it (verifiers PR 1763), or the run (NVIDIA-NeMo/Gym#605)."""
    async with house(chatml_folder, tmp_path, window_tokens=4096) as one:
        breaks_its_first_call(one)
        async with talking(api, one.access["g000001.00"]) as talker:
            heard = await talker.say("next: k7.csv", stream)
            ((call, name, arguments),) = heard.calls
            # Claude Code shows such so itself; the vendor's own client fails at a stream of broken JSON.
            unparsed = {"__unparsedToolInput": {"raw": ARGUMENTS, "len": len(ARGUMENTS)}}
            assert (name, arguments) == ("put", unparsed if api == "messages" else ARGUMENTS)
            await talker.results({call: "InputValidationError: no JSON"}, stream)
        first, second = one.kept.records
        assert second.parent == first.call
        assert (first.parsed_tool_calls, first.malformed_tool_calls) == (0, 1)
        totals = await one.totals()
        assert (totals.tool_calls, totals.malformed_tool_calls) == (0, 1)


def _repaired(call: dict[str, Any]) -> None:
    call["function"]["arguments"] = '{"folder":"da"}'


def _renamed(call: dict[str, Any]) -> None:
    call["function"] = {"name": "invalid", "arguments": '{"tool":"put","error":"no JSON"}'}


def _as_object(call: dict[str, Any]) -> None:
    unparsed = {"__unparsedToolInput": {"raw": ARGUMENTS, "len": len(ARGUMENTS)}}
    call["function"]["arguments"] = json.dumps(unparsed)


ECHOES: dict[str, Callable[[dict[str, Any]], None]] = {
    "qwen-code repairs it": _repaired,
    "opencode renames it": _renamed,
    "Claude Code wraps it": _as_object,
    "codex echoes it": lambda call: None,
}


async def broken_turn(
    one: House, echo: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer as the harness repeats it, and what it says to the call."""
    breaks_its_first_call(one)
    answer = await one.chat(USER, tools=[PUT])
    (call,) = answer["tool_calls"]
    echo(call)
    return answer, {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
async def test_whatever_a_harness_makes_of_a_broken_call_the_turn_goes_on(
    one: House, echo: Callable[[dict[str, Any]], None]
) -> None:
    answer, result = await broken_turn(one, echo)
    await one.chat(USER, answer, result, tools=[PUT])
    first, second = one.kept.records
    assert second.parent == first.call
    assert "tool_call>" not in one.script.text(second.new_input_ids)


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
async def test_a_call_that_a_compaction_keeps_is_put_back_as_it_was_sampled(
    one: House, echo: Callable[[dict[str, Any]], None]
) -> None:
    answer, result = await broken_turn(one, echo)
    summary = {"role": "user", "content": "The session so far: nothing was filed."}
    await one.chat(summary, answer, result, tools=[PUT])
    second = one.kept.records[1]
    assert second.parent is None
    shown = one.script.text(second.new_input_ids)
    assert BROKEN.removesuffix("<|im_end|>") in shown and shown.count('"da') == 1


async def test_a_call_of_a_tool_that_is_not_there_is_the_harness_to_answer(one: House) -> None:
    one.script.answer = lambda prompt: BROKEN.replace("put", "fly").replace('"da', '"data"}}')
    answer = await one.chat(USER, tools=[PUT])
    assert answer["tool_calls"][0]["function"] == {"name": "fly", "arguments": '{"folder":"data"}'}
    assert (await one.totals()).malformed_tool_calls == 0


async def test_a_call_that_names_no_tool_is_text(one: House) -> None:
    one.script.answer = lambda prompt: '<tool_call>{"name": put}</tool_call><|im_end|>'
    answer = await one.chat(USER, tools=[PUT])
    assert answer["content"] == '<tool_call>{"name": put}</tool_call>'
    assert "tool_calls" not in answer
    assert (await one.totals()).malformed_tool_calls == 1
    await one.chat(USER, answer, USER, tools=[PUT])
    assert one.kept.records[1].parent == one.kept.records[0].call


def alarms(codec: Codec, texts: list[str], *, parse_tools: bool = True) -> list[Any]:
    watch = ToolWatch("hermes")
    request = CallRequest(
        conversation=Conversation(messages=(), tools=(PUT,)), model="m", parse_tools=parse_tools
    )
    with structlog.testing.capture_logs() as logs:
        for text in texts:
            ids = codec._encode(text)
            watch.answered("c", request, codec.decode_answer(ids, "c", parse_tools=parse_tools))
    return [log for log in logs if log["event"] == "no_tool_call_parsed"]


def test_a_run_none_of_whose_tool_calls_is_read_raises_an_alarm_once(codec: Codec) -> None:
    """A wrong parser gave runs of one turn and a good reward, without a word (awslabs/agentcore-rl-toolkit PR
    97); formats that did not fit each other did the same (sglang#25242, Qwen3.8#125)."""
    (alarm,) = alarms(codec, [CODER] * 3 * ALARM_CALLS)
    assert (alarm["log_level"], alarm["looks_like"], alarm["tool_format"]) == (
        "error",
        "qwen3_coder",
        "hermes",
    )
    assert alarm["malformed"] == ALARM_CALLS
    (alarm,) = alarms(codec, ["I file it."] * ALARM_CALLS)
    assert (alarm["looks_like"], alarm["malformed"]) == (None, 0)


def test_no_alarm_is_raised_where_one_call_was_read_or_none_could_be(codec: Codec) -> None:
    read = BROKEN.replace('"da', '"data"}}').removesuffix("<|im_end|>")
    assert alarms(codec, ["I file it.", read, *["I file it."] * 2 * ALARM_CALLS]) == []
    assert alarms(codec, ["I file it."] * (ALARM_CALLS - 1)) == []
    assert alarms(codec, ["I file it."] * 2 * ALARM_CALLS, parse_tools=False) == []
