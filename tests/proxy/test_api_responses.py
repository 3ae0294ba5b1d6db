from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.proxy.api_responses import InputTokens, Responses
from gyre.proxy.conversation import CallError, CallRequest, Completion, Message, ToolCall, unavailable
from gyre.proxy.matching import ConversationIndex, repetition_key
from tests.proxy.bodies import CODEX, encoded
from tests.proxy.told import told

api = Responses()
NAME = X = "g1-00-0-0000"
Y = "g1-00-0-0001"
ANSWER = Completion(
    call="g1.00-0-0000",
    model="m",
    created_s=12,
    message=Message(
        role="assistant",
        content=("Filing.",),
        reasoning="Where?",
        tool_calls=(
            ToolCall(id="call_0", name="put", arguments={"folder": "data"}),
            ToolCall(id="call_1", name="spawn_agent", arguments={}),
        ),
    ),
    finish_reason="tool_calls",
    prompt_tokens=10,
    completion_tokens=5,
    cached_tokens=8,
    reasoning_tokens=2,
)
TEXT = {"type": "output_text", "text": "Filing.", "annotations": [], "logprobs": []}
OUTPUT = [
    {
        "type": "reasoning",
        "id": f"rs_{NAME}",
        "summary": [{"type": "summary_text", "text": "Where?"}],
        "encrypted_content": NAME,
        "status": "completed",
    },
    {"type": "message", "id": f"msg_{NAME}", "role": "assistant", "content": [TEXT], "status": "completed"},
    {
        "type": "function_call",
        "id": f"fc_{NAME}_0",
        "call_id": "call_0",
        "name": "put",
        "arguments": '{"folder":"data"}',
        "status": "completed",
    },
    {
        "type": "function_call",
        "id": f"fc_{NAME}_1",
        "call_id": "call_1",
        "name": "spawn_agent",
        "namespace": "multi_agent_v1",
        "arguments": "{}",
        "status": "completed",
    },
]


def parse(**fields: Any) -> CallRequest:
    return api.parse(json.dumps({"model": "m", "input": "hi"} | fields).encode(), {})


def messages(*items: Any, **fields: Any) -> tuple[Message, ...]:
    return parse(input=list(items), **fields).conversation.messages


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
        **fields,
    }


def call(name: str, /, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}", **fields}


def minted(answer: str, index: int, **fields: Any) -> dict[str, Any]:
    """A call as the proxy named it."""
    return call("f", call_id=f"call_{answer}_{index}") | fields


def output(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": "ok"}


def shapes(*items: Any) -> list[str]:
    """Of each message its text and the names of its calls, or whose output it is."""
    return [
        f"{message.text}({','.join(call.name for call in message.tool_calls)})"
        if message.role == "assistant"
        else message.tool_call_id or message.role
        for message in messages(*items)
    ]


def test_input_is_text_or_items_and_instructions_are_a_system_prompt() -> None:
    user = Message(role="user", content=("hi",))
    assert parse().conversation.messages == (user,)
    assert messages({"role": "user", "content": "hi"}) == (user,)
    assert messages(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    ) == (user,)
    assert parse(instructions="Be short.").conversation.messages[0] == Message(
        role="system", content=("Be short.",)
    )
    assert messages({"role": "developer", "content": "a"}, {"role": "system", "content": "b"}) == (
        Message(role="system", content=("a",)),
        Message(role="system", content=("b",)),
    )


def test_items_of_one_answer_are_one_message() -> None:
    answer = api.parse(encoded(CODEX), {}).conversation.messages[4]
    assert answer == Message(
        role="assistant",
        content=("I look.",),
        reasoning="Which?",
        sampled_as="g1-0-0000",
        tool_calls=(
            ToolCall(id="call_1", name="shell", arguments={"command": "ls"}),
            ToolCall(id="call_2", name="spawn_agent", arguments='{"message": '),
        ),
    )


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([assistant("a"), assistant("b")], ["a()", "b()"]),
        ([assistant("a"), call("f"), call("g"), output("f"), output("g")], ["a(f,g)", "f", "g"]),
        ([call("f"), output("f"), call("g"), output("g")], ["(f)", "f", "(g)", "g"]),
        ([call("f"), assistant("a")], ["(f)", "a()"]),
        ([assistant("a"), {"role": "user", "content": "x"}, call("f")], ["a()", "user", "(f)"]),
        ([assistant("a"), {"type": "reasoning", "summary": []}, assistant("b")], ["a()", "b()"]),
    ],
)
def test_without_ids_their_order_tells_answers_apart(items: list[Any], expected: list[str]) -> None:
    assert shapes(*items) == expected


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([assistant("a", id=f"msg_{X}"), assistant("b", id=f"msg_{Y}")], ["a()", "b()"]),
        ([assistant("a", id=f"msg_{X}"), call("f", id=f"fc_{Y}_0")], ["a()", "(f)"]),
        # A client that writes outputs where their calls are.
        (
            [call("f", id=f"fc_{X}_0"), output("f"), call("g", id=f"fc_{X}_1"), output("g")],
            ["(f,g)", "f", "g"],
        ),
        (
            [call("f", id=f"fc_{X}_0"), output("f"), call("g", id=f"fc_{Y}_0"), output("g")],
            ["(f)", "f", "(g)", "g"],
        ),
        # Clients that keep no ids of items, or give them new ones, keep those of calls.
        ([minted(X, 0), output("f"), minted(X, 1), output("g")], ["(f,f)", "f", "g"]),
        ([minted(X, 0), minted(Y, 0)], ["(f)", "(f)"]),
        ([minted(X, 0, id="fc_019a7c_2"), minted(X, 1, id="fc_019a7c_3")], ["(f,f)"]),
        ([assistant("a", id="msg_019a7c"), minted(X, 0, id="fc_019a7d"), minted(Y, 0)], ["a(f)", "(f)"]),
        # A vendor's ids name each item.
        ([assistant("a", id="msg_0a1b"), call("f", id="fc_0a_1b"), call("g", id="fc_0a_1c")], ["a(f,g)"]),
    ],
)
def test_ids_tell_answers_apart(items: list[Any], expected: list[str]) -> None:
    assert shapes(*items) == expected


def test_what_was_answered_is_what_comes_back() -> None:
    (message,) = messages(*OUTPUT, tools=CODEX["tools"])
    assert message.tool_calls == ANSWER.message.tool_calls
    assert (message.content, message.reasoning, message.sampled_as) == (("Filing.",), "Where?", NAME)


def test_reasoning_is_read_from_content_or_summary() -> None:
    content = [{"type": "reasoning_text", "text": "All of it."}]
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]}
    assert messages(item)[0].reasoning == "Short."
    assert messages(item | {"content": content})[0].reasoning == "All of it."


def test_an_image_that_a_tool_shows_is_left_out_and_the_policy_told() -> None:
    (message,) = messages(
        {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_image"}]}
    )
    assert message.content == ("[input_image left out: this model reads text only]",)


def test_namespaces_are_flattened_and_builtin_tools_dropped() -> None:
    request = api.parse(encoded(CODEX), {})
    assert [tool["function"]["name"] for tool in request.conversation.tools] == ["shell", "spawn_agent"]
    assert set(request.conversation.tools[1]["function"]) == {"name", "parameters"}
    assert request.parse_tools and request.stream
    assert not parse(tools=CODEX["tools"], tool_choice="none").parse_tools


def test_a_name_that_is_taken_gets_its_namespace() -> None:
    function = {"type": "function", "name": "run", "parameters": {}}
    tools = [{"type": "namespace", "name": "far", "tools": [function]}, function]
    request = parse(input=[call("c", name="run"), call("d", name="run", namespace="far")], tools=tools)
    assert [tool["function"]["name"] for tool in request.conversation.tools] == ["run", "far__run"]
    (message,) = request.conversation.messages
    assert [call.name for call in message.tool_calls] == ["run", "far__run"]
    sampled = Message(role="assistant", tool_calls=(ToolCall(id="c", name="far__run", arguments={}),))
    (item,) = json.loads(api.answer(request, completion(message=sampled)))["output"]
    assert (item["name"], item["namespace"]) == ("run", "far")


def namespace(name: str, *functions: str, describes: str = "") -> dict[str, Any]:
    tools = [
        {"type": "function", "name": function, "description": describes or name, "parameters": {}}
        for function in functions
    ]
    return {"type": "namespace", "name": name, "tools": tools}


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([namespace("a", "find"), namespace("b", "find")], {"a__find": "a", "b__find": "b"}),
        (
            [namespace("a", "find", "sort"), namespace("b", "find")],
            {"a__find": "a", "sort": "a", "b__find": "b"},
        ),
        # Names that meet again with their namespaces before them.
        (
            [namespace("a", "b__c"), namespace("a__b", "c"), namespace("x", "b__c", "c")],
            {"a__b__c": "a", "a__b__c_": "a__b", "x__b__c": "x", "x__c": "x"},
        ),
        (
            [{"type": "function", "name": "a__find"}, namespace("a", "find"), namespace("b", "find")],
            {"a__find": None, "a__find_": "a", "b__find": "b"},
        ),
    ],
)
def test_names_and_digest_depend_on_no_order_of_tools(
    tools: list[dict[str, Any]], expected: dict[str, str | None]
) -> None:
    def digest(request: CallRequest) -> bytes:
        return ConversationIndex().digests(request.conversation)[-1]

    for order in permutations(tools):
        request = parse(tools=list(order))
        offered = [tool["function"]["name"] for tool in request.conversation.tools]
        assert sorted(offered) == sorted(expected)
        found = {
            name: request.namespaces[name].namespace if name in request.namespaces else None
            for name in offered
        }
        assert found == expected
        assert digest(request) == digest(parse(tools=tools))


def test_of_tools_of_one_name_the_first_is_offered() -> None:
    one, two = namespace("far", "run", describes="one"), namespace("far", "run", describes="two")
    for tools in ([one, two], [*one["tools"], *two["tools"]]):
        request = parse(tools=tools)
        described = [tool["function"]["description"] for tool in request.conversation.tools]
        assert (described, len(request.namespaces)) == (["one"], int(tools[0] is one))


def test_a_retry_with_other_metadata_in_another_order_is_the_same() -> None:
    def key(body: Any) -> bytes:
        request = api.parse(encoded(body), {"thread-id": "t"})
        return repetition_key(request, ConversationIndex().digests(request.conversation)[-1])

    again = dict(reversed(CODEX.items())) | {"client_metadata": {"a": "2", "b": "1"}, "stream": False}
    assert key(again) == key(CODEX)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported.*send the whole input"),
        ({"conversation": "conv_1"}, "conversation is not supported.*send the whole input"),
        ({"prompt": {"id": "p"}}, "prompt is not supported"),
        ({"background": True}, "background = true is not supported"),
        ({"input": None}, "input is missing or empty"),
        ({"input": []}, "input is missing or empty"),
        ({"input": 5}, r"\$\.input"),
        ({"input": [{"role": "robot", "content": ""}]}, r"input\[0\]\.role = 'robot'"),
        ({"input": [{"content": "x"}]}, r"input\[0\]\.role = None"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]: no item is kept here"),
        ({"input": [{"type": "web_search_call"}]}, r"input\[0\]\.type = 'web_search_call' is not supported"),
        ({"input": [{"type": "function_call"}]}, r"input\[0\]\.name is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            r"input\[0\]\.content\[0\]\.type = 'input_image' is not supported; send text",
        ),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]\.name is missing"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            r"tools\[0\]\.tools\[0\]",
        ),
        ({"tools": [{"type": "namespace"}]}, r"tools\[0\]\.name is missing"),
        ({"max_output_tokens": 0}, r"\$\.max_output_tokens"),
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


def completion(**fields: Any) -> Completion:
    return Completion(**{name: getattr(ANSWER, name) for name in ANSWER.__struct_fields__} | fields)


def request() -> CallRequest:
    return parse(tools=CODEX["tools"])


def test_a_whole_answer() -> None:
    answer = json.loads(api.answer(request(), ANSWER))
    assert answer["output"] == OUTPUT
    assert (answer["id"], answer["object"], answer["status"]) == (f"resp_{NAME}", "response", "completed")
    assert answer["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    cut = completion(finish_reason="length", message=Message(role="assistant"))
    answer = json.loads(api.answer(request(), cut))
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("message", "incomplete")]
    assert told(api, request(), cut)[-1].startswith(b"event: response.incomplete\n")


def test_what_was_only_thought_is_no_message() -> None:
    answer = json.loads(api.answer(request(), completion(message=Message(role="assistant", reasoning="Hm."))))
    assert [item["type"] for item in answer["output"]] == ["reasoning"]


def test_no_calls_are_read_where_no_tool_could_be_offered() -> None:
    assert not parse(tools=[{"type": "web_search"}]).parse_tools


def test_a_streamed_answer_says_the_same() -> None:
    events = [event.decode().split("\n", 1) for event in told(api, request(), ANSWER)]
    data = [json.loads(lines.removeprefix("data: ")) for _, lines in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [event["type"] for event in data]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    assert [event["type"].removeprefix("response.") for event in data] == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *(
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ),
        *(
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ),
        "completed",
    ]
    assert [event["item"] for event in data if event["type"] == "response.output_item.done"] == OUTPUT
    assert data[-1]["response"] == json.loads(api.answer(request(), ANSWER))
    assert data[0]["response"]["output"] == []


def test_errors_have_openais_shape_and_within_a_stream_are_a_failed_response() -> None:
    error = json.loads(api.error(unavailable("later")))["error"]
    assert error == {"message": "later", "type": "server_error", "param": None, "code": "unavailable"}
    too_long = CallError(400, "x", code="context_length_exceeded")
    created, failed = api.stream(request()).error(too_long).strip().split(b"\n\n")
    assert created.startswith(b"event: response.created\n")
    response = json.loads(failed.split(b"data: ")[1])["response"]
    assert (response["status"], response["error"]) == (
        "failed",
        {"code": "context_length_exceeded", "message": "x"},
    )
    assert b'"code":"server_error"' in api.stream(request()).error(unavailable("later"))


def test_tokens_are_counted_in_openais_shape() -> None:
    assert json.loads(InputTokens().count(7)) == {"object": "response.input_tokens", "input_tokens": 7}
