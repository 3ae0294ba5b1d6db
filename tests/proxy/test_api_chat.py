from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.proxy.api_chat import ChatCompletions
from gyre.proxy.conversation import CallError, CallRequest, Completion, Message, ToolCall, unavailable
from tests.proxy.told import told

api = ChatCompletions()
USER = {"role": "user", "content": "hi"}
ANSWER = Completion(
    call="g1-0-0000",
    model="m",
    created_s=12,
    message=Message(
        role="assistant",
        content=("Filing.",),
        tool_calls=(ToolCall(id="call_0", name="put", arguments={"folder": "data"}),),
    ),
    finish_reason="tool_calls",
    prompt_tokens=10,
    completion_tokens=5,
    cached_tokens=8,
)


def parse(headers: dict[str, str] | None = None, **fields: Any) -> CallRequest:
    return api.parse(json.dumps({"messages": [USER]} | fields).encode(), headers or {})


def test_the_smallest_request() -> None:
    request = parse()
    assert request.conversation.messages == (Message(role="user", content=("hi",)),)
    assert (request.stream, request.max_tokens, request.parse_tools) == (False, None, False)


def test_unknown_fields_and_foreign_sampling_are_passed_over() -> None:
    request = parse(temperature=0, store=False, stop=["x"], metadata={"a": 1}, n=1, user=None)
    assert request == parse()


def test_the_newer_limit_wins() -> None:
    assert parse(max_tokens=9).max_tokens == 9
    assert parse(max_tokens=9, max_completion_tokens=7).max_tokens == 7


def test_tools_are_kept_as_sent_and_builtin_ones_dropped() -> None:
    tool = {"type": "function", "function": {"name": "put", "strict": True}}
    request = parse(tools=[tool | {"cache_control": {}}, {"type": "web_search"}])
    assert request.conversation.tools == (tool,)
    assert request.parse_tools
    assert not parse(tools=[tool], tool_choice="none").parse_tools


def test_roles_and_blocks_become_plain_messages() -> None:
    request = parse(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "function", "name": "put", "content": ""},
        ]
    )
    assert [(m.role, m.content) for m in request.conversation.messages] == [
        ("system", ("a", "b")),
        ("assistant", ("no",)),
        ("tool", ()),
    ]


def test_an_image_that_a_tool_shows_is_left_out_and_the_policy_told() -> None:
    (message,) = parse(messages=[{"role": "tool", "content": [{"type": "image_url"}]}]).conversation.messages
    assert message.content == ("[image_url left out: this model reads text only]",)


def test_arguments_that_are_no_object_stay_text() -> None:
    def arguments(sent: Any) -> Any:
        call = {"id": "x", "type": "function", "function": {"name": "put", "arguments": sent}}
        request = parse(messages=[{"role": "assistant", "tool_calls": [call]}])
        return request.conversation.messages[0].tool_calls[0].arguments

    assert arguments('{"a": 1}') == {"a": 1}
    assert arguments({"a": 1}) == {"a": 1}
    assert arguments('{"a": ') == '{"a": '
    assert arguments("[1]") == "[1]"
    assert arguments("") == {}


def test_headers_are_hints() -> None:
    request = parse({"thread-id": "t1", "x-stainless-retry-count": "1"})
    assert request.hints == ("thread-id=t1",)
    assert request.is_retry
    assert not parse({"x-stainless-retry-count": "0"}).is_retry


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not valid JSON"),
        (b"[]", "not a chat completion request"),
        (b"{}", "`messages`"),
        (b'{"messages": []}', r"\$\.messages"),
        (b'{"messages": [{"role": "robot"}]}', r"robot.*\$\.messages\[0\]\.role"),
        (b'{"messages": [{"role": "user", "content": 5}]}', r"\$\.messages\[0\]\.content"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            r"messages\[0\]\.content\[0\]",
        ),
        (b'{"messages": [{"role": "user"}], "n": 2}', "n = 2 is not supported"),
        (b'{"messages": [{"role": "user"}], "max_tokens": 0}', r"\$\.max_tokens"),
        (b'{"messages": [{"role": "user"}], "tools": [{"type": "function"}]}', r"tools\[0\]\.function\.name"),
        (b'{"tool_choice": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_place(body: bytes, message: str) -> None:
    with pytest.raises(CallError, match=message) as caught:
        api.parse(body, {})
    assert caught.value.status == 400


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_400(body: bytes) -> None:
    try:
        api.parse(body, {})
    except CallError as error:
        assert error.status == 400


def test_a_whole_answer() -> None:
    assert json.loads(api.answer(parse(), ANSWER)) == {
        "id": "chatcmpl-g1-0-0000",
        "object": "chat.completion",
        "created": 12,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Filing.",
                    "refusal": None,
                    "tool_calls": [
                        {
                            "id": "call_0",
                            "type": "function",
                            "function": {"name": "put", "arguments": '{"folder":"data"}'},
                        }
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 8},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def events(include_usage: bool) -> list[Any]:
    stream = b"".join(told(api, parse(stream_options={"include_usage": include_usage}), ANSWER)).decode()
    lines = stream.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_streamed_answer_says_the_same() -> None:
    chunks = events(include_usage=True)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "Filing."
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["index"] == 0
    assert calls[0]["function"] == {"name": "put", "arguments": '{"folder":"data"}'}
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None, None, None, "tool_calls"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 15


def test_usage_is_streamed_only_when_asked_for() -> None:
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in events(include_usage=False))


def test_errors_have_openais_shape() -> None:
    assert json.loads(api.error(unavailable("later")))["error"] == {
        "message": "later",
        "type": "server_error",
        "param": None,
        "code": "unavailable",
    }
    assert json.loads(api.error(CallError(401, "who?")))["error"]["type"] == "authentication_error"
    assert api.stream(parse()).error(CallError(400, "x")).startswith(b'data: {"error":')
