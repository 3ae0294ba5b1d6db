from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.proxy.api_messages import CountTokens, Messages
from gyre.proxy.conversation import (
    CallError,
    CallRequest,
    Completion,
    Message,
    ToolCall,
    prompt_too_long,
    unavailable,
)
from gyre.proxy.matching import ConversationIndex
from tests.proxy.bodies import CLAUDE_CODE, encoded
from tests.proxy.told import told

api = Messages()
USER = {"role": "user", "content": "hi"}
ANSWER = Completion(
    call="g1.00-0-0000",
    model="m",
    created_s=12,
    message=Message(
        role="assistant",
        content=("Filing.",),
        reasoning="Where?",
        tool_calls=(ToolCall(id="call_0", name="put", arguments={"folder": "data"}),),
    ),
    finish_reason="tool_calls",
    prompt_tokens=10,
    completion_tokens=5,
    cached_tokens=8,
    reasoning_tokens=2,
)
BLOCKS = [
    {"type": "thinking", "thinking": "Where?", "signature": "g1-00-0-0000"},
    {"type": "text", "text": "Filing."},
    {"type": "tool_use", "id": "call_0", "name": "put", "input": {"folder": "data"}},
]
USAGE = {
    "input_tokens": 2,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 8,
    "output_tokens": 5,
}


def parse(**fields: Any) -> CallRequest:
    return api.parse(json.dumps({"model": "m", "messages": [USER]} | fields).encode(), {})


def messages(*turns: Any, **fields: Any) -> tuple[Message, ...]:
    return parse(messages=list(turns), **fields).conversation.messages


@pytest.mark.parametrize("system", [None, "", []])
def test_no_system_prompt_is_no_message(system: Any) -> None:
    assert messages(USER, system=system) == (Message(role="user", content=("hi",)),)


def test_system_prompts_come_as_text_or_blocks_and_in_mid_conversation() -> None:
    blocks = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    assert messages(USER, system="a")[0] == Message(role="system", content=("a",))
    assert messages(USER, system=blocks)[0] == Message(role="system", content=("a", "b"))
    later = messages(USER, {"role": "system", "content": [{"type": "text", "text": "late"}]})
    assert later[1] == Message(role="system", content=("late",))


def test_the_billing_line_is_not_for_the_policy() -> None:
    request = api.parse(encoded(CLAUDE_CODE), {})
    assert request.conversation.messages[0].content == ("You are an agent.", "The folder is /w.")
    joined = "x-anthropic-billing-header: a33\nYou are an agent.\nThe folder is /w."
    for system in (joined, [{"type": "text", "text": joined}]):
        assert messages(USER, system=system)[0].content == ("You are an agent.\nThe folder is /w.",)


def test_a_turn_with_results_and_text_is_several_messages() -> None:
    turn = api.parse(encoded(CLAUDE_CODE), {}).conversation.messages[3:]
    assert turn == (
        Message(
            role="assistant",
            content=("I look.",),
            reasoning="Which?",
            tool_calls=(
                ToolCall(id="toolu_1", name="Bash", arguments={"command": "ls"}),
                ToolCall(id="toolu_2", name="Bash", arguments={}),
            ),
        ),
        Message(role="tool", content=("a.py",), tool_call_id="toolu_1"),
        Message(role="tool", content=("InputValidationError",), tool_call_id="toolu_2"),
        Message(role="user", content=("CRITICAL: Respond with TEXT ONLY",)),
    )


def test_marks_that_move_from_turn_to_turn_change_no_digest() -> None:
    def last_digest(body: Any) -> bytes:
        return ConversationIndex().digests(api.parse(encoded(body), {}).conversation)[-1]

    moved = json.loads(json.dumps(CLAUDE_CODE))
    moved["system"][0]["text"] = moved["system"][0]["text"].replace("a33", "b7d")
    del moved["system"][1]["cache_control"]
    moved["messages"][0]["content"][1].pop("cache_control")
    moved["messages"][1]["content"] = [{"type": "text", "text": "Agent types: general."}]
    moved["messages"][2]["content"] = moved["messages"][2]["content"][2:]
    result = moved["messages"][3]["content"][0]
    result["content"] = [{"type": "text", "text": result["content"]}]
    del result["is_error"]
    moved["tools"][0]["cache_control"] = {"type": "ephemeral"}
    assert last_digest(moved) == last_digest(CLAUDE_CODE)


def test_empty_turns_stay_turns() -> None:
    assert messages({"role": "user", "content": ""}, {"role": "user", "content": []}) == (
        Message(role="user"),
        Message(role="user"),
    )
    (empty,) = messages({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]})
    assert empty == Message(role="tool", tool_call_id="x")


def test_an_image_that_a_tool_shows_is_left_out_and_the_policy_told() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "x",
        "content": [{"type": "text", "text": "k7.png"}, IMAGE],
    }
    (message,) = messages({"role": "user", "content": [result]})
    assert message.content == ("k7.png", "[image left out: this model reads text only]")


def test_tools_with_a_schema_are_offered() -> None:
    request = api.parse(encoded(CLAUDE_CODE), {})
    parameters = CLAUDE_CODE["tools"][0]["input_schema"]
    function = {"name": "Bash", "description": "Runs <it>.", "parameters": parameters}
    assert request.conversation.tools == ({"type": "function", "function": function},)
    assert request.parse_tools and request.max_tokens == 32000 and request.stream
    assert not parse(tools=CLAUDE_CODE["tools"], tool_choice={"type": "none"}).parse_tools


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, r"\$\.messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, r"robot.*\$\.messages\[0\]\.role"),
        ({"messages": [{"role": "user"}]}, r"`content`.*\$\.messages\[0\]"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            r"messages\[0\]\.content\[0\]\.type = 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
            r"messages\[0\]\.content\[0\]\.content is neither text nor",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\]\.text is missing"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            r"content\[0\]\.name is mi",
        ),
        ({"system": [IMAGE]}, r"system\[0\]\.type = 'image'"),
        ({"tools": [{"input_schema": {}}]}, r"tools\[0\]\.name is missing"),
        ({"max_tokens": 0}, r"\$\.max_tokens"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_place(fields: Any, message: str) -> None:
    with pytest.raises(CallError, match=message) as caught:
        parse(**fields)
    assert caught.value.status == 400


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_400(body: bytes) -> None:
    try:
        api.parse(body, {})
    except CallError as error:
        assert error.status == 400


def test_a_whole_answer() -> None:
    assert json.loads(api.answer(parse(), ANSWER)) == {
        "id": "msg_g1-00-0-0000",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": BLOCKS,
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": USAGE,
    }


def test_what_was_answered_is_what_comes_back() -> None:
    sent = json.loads(api.answer(parse(), ANSWER))["content"]
    (message,) = messages({"role": "assistant", "content": sent})
    assert message.tool_calls == ANSWER.message.tool_calls
    assert (message.content, message.reasoning) == (("Filing.",), "Where?")
    assert message.sampled_as == "g1-00-0-0000"


def test_a_streamed_answer_says_the_same() -> None:
    events = [event.decode().split("\n", 1) for event in told(api, parse(), ANSWER)]
    data = [json.loads(lines.removeprefix("data: ")) for _, lines in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [event["type"] for event in data]
    assert [event["type"] for event in data] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    starts = [event["content_block"] for event in data if event["type"] == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_0", "name": "put", "input": {}},
    ]
    deltas = [(event["index"], event["delta"]) for event in data if event["type"] == "content_block_delta"]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "Where?"}),
        (0, {"type": "signature_delta", "signature": "g1-00-0-0000"}),
        (1, {"type": "text_delta", "text": "Filing."}),
        (2, {"type": "input_json_delta", "partial_json": '{"folder":"data"}'}),
    ]
    assert data[0]["message"]["content"] == [] and data[0]["message"]["stop_reason"] is None
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert data[-2]["usage"] == USAGE


def test_a_long_text_is_several_deltas() -> None:
    long = Message(role="assistant", content=("x" * 20_000,))
    events = b"".join(told(api, parse(), Completion(**{**fields_of(ANSWER), "message": long})))
    assert max(len(line) for line in events.split(b"\n")) < 9000
    assert events.count(b"text_delta") == 3


def fields_of(completion: Completion) -> dict[str, Any]:
    return {name: getattr(completion, name) for name in completion.__struct_fields__}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (prompt_too_long(10, 5), "invalid_request_error"),
        (CallError(401, "who?"), "authentication_error"),
        (CallError(404, "where?"), "not_found_error"),
        (CallError(405, "how?"), "invalid_request_error"),
        (CallError(413, "how large?"), "request_too_large"),
        (CallError(500, "oh"), "api_error"),
        (unavailable("later"), "overloaded_error"),
    ],
)
def test_errors_have_anthropics_shape(error: CallError, kind: str) -> None:
    expected = {"type": "error", "error": {"type": kind, "message": error.message}}
    assert json.loads(api.error(error)) == expected
    assert json.loads(CountTokens().error(error)) == expected
    event = b"event: error\ndata: " + api.error(error) + b"\n\n"
    assert api.stream(parse()).error(error) == event


def test_a_waiting_stream_pings() -> None:
    assert api.keep_alive == b'event: ping\ndata: {"type":"ping"}\n\n'
