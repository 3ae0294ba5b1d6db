from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.trajectory.records import CallRecord
from gyre.trajectory.roles import classify, count
from tests.trajectory.trees import calls_tool, random_records, record, says, tree_of, user

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
any_messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant"]) | json_values,
        "content": json_values | st.lists(st.fixed_dictionaries({"text": json_values}), max_size=2),
        "tool_calls": json_values
        | st.lists(
            st.fixed_dictionaries({"function": st.fixed_dictionaries({"arguments": json_values})}), max_size=2
        ),
    },
)
SUMMARY = "k7.csv went to data, and the box is still to be filed."
ASK_SUMMARY = user("Summarise what was done so far.")


def roles_of(*records: CallRecord) -> dict[str, str]:
    tree = tree_of(*records)
    return {node.call: role for node, role in zip(tree.nodes, classify(tree).of_node, strict=True)}


def compaction(summary: str = SUMMARY, **next_root: Any) -> list[CallRecord]:
    """A main agent that compacts: two calls, the summary call on them, the new root."""
    root = {"messages": [user(f"The session so far: {summary}\nnext: b.md")]} | next_root
    return [
        record("m1", messages=[user("tidy the inbox")], output=calls_tool("put", folder="data")),
        record("m2", "m1", output=calls_tool("put", folder="docs")),
        record("s", "m2", messages=[ASK_SUMMARY], output=says(summary), has_tools=False),
        record("m3", **root, output=says("All done, nothing is left.")),
    ]


def delegation(prompt: str = "file the box") -> list[CallRecord]:
    return [
        record("m1", messages=[user("tidy the inbox")], output=calls_tool("delegate", prompt=prompt)),
        record("a1", messages=[user(prompt)], output=calls_tool("put", folder="data")),
        record("a2", "a1", output=says("filed two")),
        record("m2", "m1", output=says("inbox is empty")),
    ]


def test_a_single_agent_is_main() -> None:
    assert roles_of(record("a", messages=[user("go")]), record("b", "a")) == {"a": "main", "b": "main"}


def test_a_root_whose_user_text_was_a_tool_calls_argument_is_a_sub_agent() -> None:
    assert roles_of(*delegation()) == {"m1": "main", "a1": "sub_agent", "a2": "sub_agent", "m2": "main"}


def test_a_call_whose_text_reappears_in_a_later_roots_user_message_is_a_summary() -> None:
    assert roles_of(*compaction()) == {"m1": "main", "m2": "main", "s": "main_summary", "m3": "main"}


def test_of_claude_codes_summary_only_what_its_tags_hold_reappears() -> None:
    written = f"<analysis>\nAll was well.\n</analysis>\n\n<summary>\n{SUMMARY}\n</summary>"
    m1 = record("m1", messages=[user("go")], output=calls_tool("put", folder="data"))
    s = record("s", "m1", messages=[ASK_SUMMARY], output=says(written))
    m2 = record("m2", messages=[user(f"This session is being continued.\n\nSummary:\n{SUMMARY}\n\nGo on.")])
    assert roles_of(m1, s, m2) == {"m1": "main", "s": "main_summary", "m2": "main"}


def test_a_summary_may_reappear_as_an_assistant_message() -> None:
    records = compaction(messages=[user("What did we do so far?"), says(SUMMARY), user("Continue.")])
    assert roles_of(*records)["s"] == "main_summary"


def test_a_kept_assistant_message_is_no_summary_where_a_user_message_holds_one() -> None:
    kept = "First I look at what lies in the inbox."
    m1 = record("m1", messages=[user("go")], output=says(kept))
    s = record("s", "m1", messages=[ASK_SUMMARY], output=says(SUMMARY), has_tools=False)
    m2 = record("m2", messages=[user(f"So far: {SUMMARY}"), says(kept + " " + SUMMARY), says(kept)])
    assert roles_of(m1, s, m2) == {"m1": "main", "s": "main_summary", "m2": "main"}


def test_a_summary_may_stand_in_any_block_of_any_user_message() -> None:
    blocks = [{"type": "text", "text": "context"}, {"type": "text", "text": f"Summary: {SUMMARY}"}]
    records = compaction(messages=[user("environment"), {"role": "user", "content": blocks}])
    assert roles_of(*records)["s"] == "main_summary"


def test_a_sub_agent_that_compacts_stays_a_sub_agent() -> None:
    roles = roles_of(
        record("m1", messages=[user("go")], output=calls_tool("delegate", prompt="file the box")),
        record("a1", messages=[user("file the box")], output=calls_tool("put", folder="data")),
        record("s", "a1", messages=[ASK_SUMMARY], output=says(SUMMARY), has_tools=False),
        record("a2", messages=[user(f"So far: {SUMMARY}")]),
        record("a3", "a2"),
    )
    assert roles == {
        "m1": "main", "a1": "sub_agent", "s": "sub_agent_summary", "a2": "sub_agent", "a3": "sub_agent"
    }  # fmt: skip


def test_a_second_compaction_continues_the_segment_of_the_first() -> None:
    second = "Everything in the inbox but one file is done."
    roles = roles_of(
        *compaction(),
        record("s2", "m3", messages=[ASK_SUMMARY], output=says(second), has_tools=False),
        record("m4", messages=[user(f"The session so far: {second}")]),
    )
    assert roles["s2"] == "main_summary"
    assert roles["m4"] == "main"


def test_a_summary_that_quotes_a_sub_agents_answer_is_still_the_summary() -> None:
    quoting = "The box is filed: filed two. Then a.md went to docs."
    roles = roles_of(
        *delegation(),
        record("s", "m2", messages=[ASK_SUMMARY], output=says(quoting), has_tools=False),
        record("m3", messages=[user(f"So far: {quoting}")]),
    )
    assert roles["s"] == "main_summary"
    assert roles["a2"] == "sub_agent"


def test_a_short_answer_that_appears_in_a_later_prompt_by_chance_is_no_summary() -> None:
    roles = roles_of(
        record("m1", messages=[user("go")], output=says("done")),
        record("m2", messages=[user("are you done?")]),
    )
    assert roles == {"m1": "main", "m2": "main"}


def test_a_short_answer_to_a_request_without_tools_is_a_summary() -> None:
    assert roles_of(*compaction("2 filed"))["s"] == "main_summary"


def test_a_text_that_was_only_sampled_later_proves_nothing() -> None:
    roles = roles_of(
        record("m1", messages=[user(f"So far: {SUMMARY}")]),
        record("s", "m1", output=says(SUMMARY)),
    )
    assert roles == {"m1": "main", "s": "main"}


def test_a_nested_argument_spawns_too() -> None:
    roles = roles_of(
        record("m1", messages=[user("go")], output=calls_tool("agents", jobs=[{"text": "file the box"}])),
        record("a1", messages=[user("file the box")]),
    )
    assert roles["a1"] == "sub_agent"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{broken"}}]},
        {"role": "assistant", "tool_calls": [{"function": None}, "text", 3]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "[1, null]"}}]},
        {"role": "assistant", "content": [3, {"text": 5}, {"type": "image"}]},
        {},
    ],
)
def test_malformed_messages_prove_nothing(message: dict[str, Any]) -> None:
    roles = roles_of(
        record("m1", messages=[user("go")], output=message),
        record("m2", messages=[message, {"role": "user"}, user("go on")]),
    )
    assert roles == {"m1": "main", "m2": "main"}


PROMPT = "Fix the bug in the parser of dates."
TASK = [{"role": "system", "content": "You are an agent."}, user(PROMPT)]


def title(asked: str = f"<session>{PROMPT}</session>", answer: str = '{"title": "Fix dates"}') -> CallRecord:
    messages = [{"role": "system", "content": "Write a title."}, user(asked)]
    return record("t", messages=messages, output=says(answer), has_tools=False)


@pytest.mark.parametrize("asked", [f"<session>{PROMPT}</session>", PROMPT])
@pytest.mark.parametrize("answer", ['{"title": "Fix dates"}', "Fix the bug in the parser", "Fix", ""])
@pytest.mark.parametrize("first", [True, False])
def test_a_title_that_is_asked_for_beside_the_agent_is_auxiliary(
    asked: str, answer: str, first: bool
) -> None:
    its, main = title(asked, answer), record("m1", messages=TASK, output=calls_tool("read", path="dates.py"))
    calls = [its, main] if first else [main, its]
    roles = roles_of(*calls, record("m2", "m1", messages=[{"role": "tool", "content": "Fix"}]))
    assert roles == {"t": "auxiliary", "m1": "main", "m2": "main"}


def test_a_call_beside_the_agent_whose_answer_comes_back_is_not_auxiliary() -> None:
    plan = "First the tests of the parser, then its code."
    m1 = record("m1", messages=TASK, output=calls_tool("plan"))
    planned = record("m2", "m1", messages=[{"role": "tool", "content": f"The plan: {plan}"}])
    assert roles_of(m1, title(answer=plan), planned)["t"] == "main"


def test_an_agents_history_in_one_text_is_a_summarys_prompt_where_its_answer_comes_back() -> None:
    m1 = record("m1", messages=TASK, output=calls_tool("read", path="dates.py"))
    s = title(f"user: {PROMPT}\nassistant: read dates.py", SUMMARY)
    m2 = record("m2", messages=[user("What did we do so far?"), says(SUMMARY), user("Continue.")])
    assert roles_of(m1, s, m2) == {"m1": "main", "t": "main_summary", "m2": "main"}


def test_an_agent_without_tools_is_main() -> None:
    assert roles_of(title(), record("m1", messages=TASK, has_tools=False)) == {"t": "main", "m1": "main"}


@pytest.mark.parametrize("more", [[], [user("Your answer had no visible output.")]])
@pytest.mark.parametrize("parent", [None, "m0"])
def test_an_empty_answer_to_a_prompt_that_is_asked_again_is_auxiliary(
    more: list[dict[str, Any]], parent: str | None
) -> None:
    roles = roles_of(
        record("m0", messages=[user("go")], output=calls_tool("read", path="dates.py")),
        record("empty", parent, messages=TASK, output=says(" ")),
        record("m1", parent, messages=[*TASK, *more], output=says("")),
    )
    assert roles == {"m0": "main", "empty": "auxiliary", "m1": "main"}


def test_an_empty_answer_that_is_gone_on_from_is_main() -> None:
    empty = record("empty", messages=TASK, output=says(""))
    roles = roles_of(empty, record("m1", messages=TASK), record("m2", "empty", messages=[user("Go on.")]))
    assert set(roles.values()) == {"main"}


@pytest.mark.parametrize("command", ["continue", "git status"])
def test_a_short_argument_is_no_spawn_prompt(command: str) -> None:
    m1 = record("m1", messages=[user("tidy the inbox")], output=calls_tool("bash", command=command))
    assert roles_of(m1, record("m2", messages=[user(command)]))["m2"] == "main"


def test_counts_are_of_compactions_sub_agents_and_retries() -> None:
    records = [
        *compaction(),
        record("m4", "m3", out=[3, 4, 5], output=calls_tool("delegate", prompt="file the box")),
        record("a1", messages=[user("file the box")]),
    ]
    tree = tree_of(*records)
    counts = count(tree, classify(tree), retries=2)
    assert counts.calls == 6
    assert counts.sampled_tokens == 8
    assert counts.turns == 4
    assert counts.roles == {"main": 4, "main_summary": 1, "sub_agent": 1}
    assert (counts.compactions, counts.sub_agents, counts.retries) == (1, 1, 2)


def test_a_continuation_sampled_twice_is_one_compaction() -> None:
    tree = tree_of(*compaction(), record("m3again", messages=[user(f"The session so far: {SUMMARY}")]))
    assert count(tree, classify(tree), retries=0).compactions == 1


@given(random_records())
def test_each_call_has_a_role_and_summaries_prove_themselves(records: list[CallRecord]) -> None:
    tree = tree_of(*records)
    roles = classify(tree)
    assert len(roles.of_node) == len(tree.nodes)
    for root, summary in roles.summaries.items():
        assert summary < root
        assert tree.nodes[summary].output_message["content"] in tree.nodes[root].messages[0]["content"]
        assert roles.of_node[summary].endswith("_summary")
        assert roles.of_node[root].removesuffix("_summary") == roles.of_node[summary].removesuffix("_summary")
    for root in roles.spawns:
        assert roles.of_node[root].startswith("sub_agent")


@given(st.lists(st.tuples(any_messages, any_messages, st.booleans()), min_size=1, max_size=4))
def test_whatever_a_harness_sends_has_a_role(
    calls: list[tuple[dict[str, Any], dict[str, Any], bool]],
) -> None:
    records = [
        record(f"c{index}", messages=[message], output=output, has_tools=has_tools)
        for index, (message, output, has_tools) in enumerate(calls)
    ]
    assert len(roles_of(*records)) == len(calls)


@pytest.mark.parametrize("arguments", ["[" * 100_000, '"\\ud800"', "\ud800", ""])
def test_arguments_that_are_no_json_prove_nothing(arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}
    roles = roles_of(record("m1", output=message), record("m2", messages=[user(arguments)]))
    assert roles == {"m1": "main", "m2": "main"}
