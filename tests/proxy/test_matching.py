from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.proxy.api_chat import ChatCompletions
from gyre.proxy.conversation import CallRequest, Conversation, Message, ToolCall
from gyre.proxy.matching import ConversationIndex, Match, draw_seed, repetition_key

TOOL = {"type": "function", "function": {"name": "put", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "You tidy an inbox."}
USER = {"role": "user", "content": "next: k7.csv"}
RESULT = {"role": "tool", "tool_call_id": "call_c0_0", "content": "next: box"}


def conversation(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> Conversation:
    body = msgspec.json.encode({"messages": messages, "tools": tools or []})
    return ChatCompletions().parse(body, {}).conversation


def sampled_call(call: str, **arguments: Any) -> Message:
    return Message(
        role="assistant", tool_calls=(ToolCall(id=f"call_{call}_0", name="put", arguments=arguments),)
    )


def echo(answer: Message, **changes: Any) -> dict[str, Any]:
    return answer.to_openai() | changes


class Tree:
    """An index that gives each call one new and one sampled token."""

    def __init__(self) -> None:
        self.index = ConversationIndex()

    def match(self, asked: Conversation) -> Match:
        return self.index.match(asked, self.index.digests(asked))

    def record(self, call: str, asked: Conversation, answer: Message) -> Match:
        match = self.match(asked)
        self.index.add(
            call,
            parent=match.node,
            digest=self.index.digests(asked)[-1],
            answer=answer,
            new_input_ids=[len(call)],
            output_ids=[100 + len(call)],
        )
        return match


def test_nothing_recorded_is_a_root() -> None:
    assert Tree().match(conversation(USER)) == Match(None, 0)


def test_a_conversation_that_goes_on_matches_its_last_call() -> None:
    tree = Tree()
    first = sampled_call("c0", folder="data")
    tree.record("c0", conversation(SYSTEM, USER), first)
    second = conversation(SYSTEM, USER, echo(first), RESULT)
    assert tree.record("c1", second, Message(role="assistant", content=("done",))) == Match("c0", 3)
    third = conversation(SYSTEM, USER, echo(first), RESULT, {"role": "assistant", "content": "done"}, USER)
    assert tree.match(third) == Match("c1", 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"content": ""},
        {"content": []},
        {"content": None, "cache_control": {"type": "ephemeral"}},
        {
            "tool_calls": [
                {
                    "id": "other",
                    "function": {"name": "put", "arguments": '{ "n": 1, "folder": "d\\u00e4ta" }'},
                }
            ]
        },
        {
            "tool_calls": [
                {"type": "function", "function": {"name": "put", "arguments": {"folder": "däta", "n": 1}}}
            ]
        },
        # Repaired by the harness: the id says what was really sampled.
        {
            "tool_calls": [
                {"id": "call_c0_0", "function": {"name": "put", "arguments": '{"folder": "data", "x": 0}'}}
            ]
        },
    ],
)
def test_a_reformatted_answer_is_recognised(changes: dict[str, Any]) -> None:
    tree = Tree()
    answer = sampled_call("c0", folder="däta", n=1.0)
    tree.record("c0", conversation(USER), answer)
    assert tree.match(conversation(USER, echo(answer, **changes), RESULT)) == Match("c0", 2)


@pytest.mark.parametrize("thought", [None, "", "Where?", "Something else."])
def test_what_harnesses_do_with_thoughts_changes_nothing(thought: str | None) -> None:
    """Claude Code leaves them out at the user's next turn, others always or never (slime#2288)."""
    tree = Tree()
    answer = msgspec.structs.replace(sampled_call("c0", folder="data"), reasoning="Where?")
    tree.record("c0", conversation(USER), answer)
    echoed = echo(answer, reasoning_content=thought)
    assert tree.match(conversation(USER, echoed, RESULT)) == Match("c0", 2)


def test_an_answer_that_a_compaction_keeps_is_context_of_a_new_root() -> None:
    """Claude Code and qwen-code keep the newest turns behind the summary, where they were not sampled."""
    tree = Tree()
    answer = sampled_call("c0", folder="data")
    tree.record("c0", conversation(SYSTEM, USER), answer)
    summary = {"role": "user", "content": "The session so far: nothing was filed."}
    compacted = conversation(SYSTEM, summary, echo(answer), RESULT)
    assert tree.record("c1", compacted, Message(role="assistant", content=("ok",))) == Match(None, 0)
    assert tree.match(
        conversation(SYSTEM, summary, echo(answer), RESULT, {"role": "assistant", "content": "ok"}, USER)
    ) == Match("c1", 5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}),
        ({"role": "system", "content": "hi"}, {"role": "developer", "content": "hi"}),
        (
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}], "id": "m1"},
        ),
        (
            {"role": "system", "content": [{"text": "x-anthropic-billing-header: a33"}, {"text": "hi"}]},
            {"role": "system", "content": [{"text": "x-anthropic-billing-header: b7d"}, {"text": "hi"}]},
        ),
        (
            {"role": "system", "content": "x-anthropic-billing-header: a33\nhi"},
            {"role": "system", "content": "x-anthropic-billing-header: b7d\nhi"},
        ),
    ],
)
def test_a_reformatted_prompt_is_recognised(before: dict[str, Any], after: dict[str, Any]) -> None:
    tree = Tree()
    tree.record("c0", conversation(before), Message(role="assistant", content=("ok",)))
    assert tree.match(conversation(after, {"role": "assistant", "content": "ok\n"}, USER)) == Match("c0", 2)


def test_what_follows_the_billing_line_tells_prompts_apart() -> None:
    def root(text: str) -> bytes:
        system = {"role": "system", "content": f"x-anthropic-billing-header: a33\n{text}"}
        return ConversationIndex().digests(conversation(system, USER))[-1]

    assert root("You are A") != root("You are B")


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "next: k8.csv"},
        {"role": "system", "content": "next: k7.csv"},
        {"role": "user", "content": [{"text": "next:"}, {"text": " k7.csv"}]},
        {"role": "user", "content": "next: k7.csv", "name": "bob"},
    ],
)
def test_another_prompt_is_another_root(other: dict[str, Any]) -> None:
    tree = Tree()
    answer = Message(role="assistant", content=("ok",))
    tree.record("c0", conversation(USER), answer)
    assert tree.match(conversation(other, echo(answer), USER)) == Match(None, 0)


def test_other_tools_are_another_root_but_their_order_is_not() -> None:
    tree = Tree()
    other = {"type": "function", "function": {"name": "delegate"}}
    answer = Message(role="assistant", content=("ok",))
    tree.record("c0", conversation(USER, tools=[TOOL, other]), answer)
    history = (USER, echo(answer), USER)
    assert tree.match(conversation(*history)).node is None
    assert tree.match(conversation(*history, tools=[TOOL])).node is None
    moved = [other | {"cache_control": {"type": "ephemeral"}}, TOOL]
    assert tree.match(conversation(*history, tools=moved)).node == "c0"


def test_a_dropped_answer_forks_at_its_parent() -> None:
    tree = Tree()
    first = sampled_call("c0", folder="data")
    tree.record("c0", conversation(USER), first)
    base = (USER, echo(first), RESULT)
    tree.record("c1", conversation(*base), Message(role="assistant", content=("I refuse",)))
    complaint = {"role": "user", "content": "Call a tool."}
    assert tree.match(conversation(*base, complaint)) == Match("c0", 2)


def test_a_foreign_answer_is_new_content() -> None:
    tree = Tree()
    answer = Message(role="assistant", content=("ok",))
    tree.record("c0", conversation(USER), answer)
    foreign = {"role": "assistant", "content": "No response requested."}
    assert tree.match(conversation(USER, echo(answer), USER, foreign, USER)) == Match("c0", 2)


def test_answers_that_are_alike_are_told_apart_by_their_ids() -> None:
    tree = Tree()
    for call in ("c0", "c1", "c2"):
        tree.record(call, conversation(USER), sampled_call(call, folder="data"))
    assert tree.match(conversation(USER, echo(sampled_call("c1", folder="data")), RESULT)).node == "c1"
    without_ids = sampled_call("unknown", folder="data")
    assert tree.match(conversation(USER, echo(without_ids), RESULT)).node == "c2"


def test_path_ids_are_what_was_sent_and_sampled() -> None:
    tree = Tree()
    answer = Message(role="assistant", content=("ok",))
    tree.record("c0", conversation(USER), answer)
    tree.record("c_1", conversation(USER, echo(answer), USER), answer)
    assert tree.index.path_ids("c_1") == [2, 102, 3, 103]
    assert tree.index.path_ids(None) == []


def test_a_prompt_has_the_same_digest_however_it_was_reached() -> None:
    tree = Tree()
    tree.record("c0", conversation(USER), Message(role="assistant", content=("ok",)))
    assert tree.index.prompt_digest("c0", [7]) == tree.index.prompt_digest("c0", [7])
    assert tree.index.prompt_digest("c0", [7]) != tree.index.prompt_digest(None, [7])


def test_draws_differ_by_job_execution_prompt_occurrence_and_refill() -> None:
    seeds = {
        draw_seed(job, execution, prompt, occurrence, refill)
        for job in (0, 1)
        for execution in ("g1.0", "g1.1")
        for prompt in (b"a", b"b")
        for occurrence in (0, 1)
        for refill in (0, 1, 2)
    }
    assert len(seeds) == 48
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert draw_seed(0, "g1.0", b"a", 0) in seeds


def test_stream_alone_makes_no_other_request() -> None:
    request = CallRequest(conversation=conversation(USER), model="m", max_tokens=5)
    key = repetition_key(request, b"digest")
    assert repetition_key(msgspec.structs.replace(request, stream=True, include_usage=True), b"digest") == key
    assert repetition_key(msgspec.structs.replace(request, max_tokens=6), b"digest") != key
    assert repetition_key(msgspec.structs.replace(request, hints=("thread-id=2",)), b"digest") != key
    assert repetition_key(request, b"other") != key


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_any_arguments_are_recognised_after_a_round_trip(arguments: dict[str, Any]) -> None:
    tree = Tree()
    answer = sampled_call("c0", **{"a": arguments})
    tree.record("c0", conversation(USER), answer)
    history = echo(answer)
    history["tool_calls"][0]["id"] = "lost"
    assert tree.match(conversation(USER, history, RESULT)).node == "c0"


@pytest.mark.parametrize("left", ["", "I file", "I file it."])
def test_what_a_broken_stream_left_before_the_answer_is_no_fork(left: str) -> None:
    tree = Tree()
    answer = sampled_call("c0", folder="data")
    answer = Message(role="assistant", content=("I file it.",), tool_calls=answer.tool_calls)
    tree.record("c0", conversation(USER, tools=[TOOL]), answer)
    torn = {"role": "assistant", "content": left}
    asked = conversation(USER, torn, echo(answer), RESULT, tools=[TOOL])
    assert tree.record("c1", asked, Message(role="assistant", content=("Done.",))) == Match("c0", 3)
    done = {"role": "assistant", "content": "Done."}
    assert tree.match(conversation(*[USER, torn, echo(answer), RESULT, done, USER], tools=[TOOL])) == Match(
        "c1", 5
    )


def test_an_answer_that_was_sampled_is_no_remains_of_the_next() -> None:
    tree = Tree()
    ok, more = Message(role="assistant", content=("ok",)), Message(role="assistant", content=("ok, more",))
    tree.record("c0", conversation(USER), ok)
    assert tree.record("c1", conversation(USER, echo(ok)), more) == Match("c0", 2)
    assert tree.match(conversation(USER, echo(ok), echo(more), USER)) == Match("c1", 3)


def test_another_answer_before_an_answer_is_a_fork() -> None:
    tree = Tree()
    answer = Message(role="assistant", content=("I file it.",))
    tree.record("c0", conversation(USER), answer)
    other = {"role": "assistant", "content": "I wait."}
    assert tree.match(conversation(USER, other, echo(answer), USER)) == Match(None, 0)
