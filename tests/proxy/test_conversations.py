"""Whole conversations by the vendors' own clients, of every API: what was sampled is never encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gyre.trajectory.records import CallRecord
from gyre.trajectory.roles import classify
from gyre.trajectory.tree import TrajectoryTree
from tests.proxy.house import House, house
from tests.proxy.talkers import Heard, Talker, talking
from tests.proxy.tokenizer_folders import QWEN3, write_tokenizer

APIS = ("chat", "messages", "responses")
# As no template and no JSON encoder would write it, so that it cannot come back by encoding it again.
PUT = '<tool_call>{"arguments":{"folder" :  "%s"}, "name":"put"}</tool_call>'
ANSWERS = (
    f"<think>\nTwo at once.\n</think>\n\nI file them.\n{PUT % 'data'}\n{PUT % 'docs'}",
    f"<think>Another.</think>{PUT % 'data'}",
    "<think>\nThat was all.\n</think>\n\nDone.",
    "Bye.",
)
RESULTS = ("next: box", "next: k7.csv", "inbox is empty")


def answer_in_turn(one: House, answers: Sequence[str]) -> None:
    """The n-th answer to a prompt with n turns before it."""
    one.script.answer = lambda prompt: answers[prompt.count("<|im_start|>assistant") - 1] + "<|im_end|>"


async def play(talker: Talker, stream: bool) -> list[Heard]:
    first = await talker.say("next: k7.csv", stream)
    results = {call: RESULTS[index] for index, (call, _, _) in enumerate(first.calls)}
    second = await talker.results(results, stream)
    third = await talker.results({second.calls[0][0]: RESULTS[2]}, stream)
    return [first, second, third, await talker.say("thanks", stream)]


def check_nothing_was_encoded_again(one: House, records: Sequence[CallRecord]) -> None:
    for index, record in enumerate(records):
        assert record.output_ids == tuple(one.script.tokenizer.encode(f"{ANSWERS[index]}<|im_end|>").ids)
        assert record.parent == (records[index - 1].call if index else None)
        path = one.kept.path(record.call)
        sent = next(sent for _, sent in one.script.requests if sent.call == record.call)
        assert [*sent.prompt_ids, *record.output_ids] == path
        new = one.script.text(record.new_input_ids)
        assert "tool_call>" not in new.replace("# Tools", "") and "think>" not in new


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
async def test_a_conversation_with_tools_is_one_path(
    chatml_folder: Path, tmp_path: Path, api: str, stream: bool
) -> None:
    async with house(chatml_folder, tmp_path, window_tokens=4096, max_new_tokens=256) as one:
        answer_in_turn(one, ANSWERS)
        async with talking(api, one.access["g000001.00"]) as talker:
            heard = await play(talker, stream)
        records = one.kept.records
        check_nothing_was_encoded_again(one, records)
        assert [answer.text for answer in heard] == ["I file them.", "", "Done.", "Bye."]
        assert [answer.reasoning for answer in heard] == ["Two at once.", "Another.", "That was all.", ""]
        assert [[arguments["folder"] for *_, arguments in answer.calls] for answer in heard] == [
            ["data", "docs"],
            ["data"],
            [],
            [],
        ]
        for record, answer in zip(records, heard, strict=True):
            assert sum(answer.tokens) == len(one.kept.path(record.call))
            assert answer.tokens[1] == len(record.output_ids)
        stops = {
            "chat": ("tool_calls", "stop"),
            "messages": ("tool_use", "end_turn"),
            "responses": ("completed", "completed"),
        }
        assert (heard[0].stop, heard[3].stop) == stops[api]


@pytest.mark.parametrize("api", APIS)
async def test_a_template_that_drops_what_was_thought_forks_nothing(tmp_path: Path, api: str) -> None:
    """The prompt was rendered anew and began with other tokens (prime-rl#1334, ART#726, verl#3477): of 8
    rollouts 64 samples were made (slime#2288)."""
    folder = write_tokenizer(tmp_path / "tokenizer", QWEN3)
    async with house(folder, tmp_path, window_tokens=4096, max_new_tokens=256) as one:
        answer_in_turn(one, ANSWERS)
        async with talking(api, one.access["g000001.00"]) as talker:
            await play(talker, stream=True)
        check_nothing_was_encoded_again(one, one.kept.records)


async def test_all_apis_make_the_same_records(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path, window_tokens=4096, max_new_tokens=256) as one:
        answer_in_turn(one, ANSWERS)
        for index, api in enumerate(APIS):
            # The same name each time, so that calls have the same ids.
            await one.open("g000001.00")
            async with talking(api, one.access["g000001.00"]) as talker:
                await play(talker, stream=bool(index % 2))
        by_api = [one.kept.records[start : start + 4] for start in (0, 4, 8)]
        for records in by_api[1:]:
            for record, other in zip(records, by_api[0], strict=True):
                assert record.new_input_ids == other.new_input_ids
                assert record.messages == other.messages
                assert record.output_message == other.output_message


SPAWN = '<tool_call>{"name": "put", "arguments": {"folder": "File what is in the box."}}</tool_call>'


@pytest.mark.parametrize("api", APIS)
async def test_a_sub_agent_is_known_by_its_prompt_behind_other_text(
    chatml_folder: Path, tmp_path: Path, api: str
) -> None:
    async with house(chatml_folder, tmp_path, window_tokens=4096, max_new_tokens=64) as one:
        one.script.answer = lambda prompt: ("Filed." if "the box" in prompt else SPAWN) + "<|im_end|>"
        access = one.access["g000001.00"]
        async with talking(api, access) as main, talking(api, access) as sub_agent:
            spawned = await main.say("next: box", stream=False)
            found = await sub_agent.say(("Today is Monday.", "File what is in the box."), stream=False)
            await main.results({spawned.calls[0][0]: found.text}, stream=False)
        tree = TrajectoryTree("g000001.00")
        for record in one.kept.records:
            tree.add(record)
        assert classify(tree).of_node == ("main", "sub_agent", "main")


@pytest.mark.parametrize("api", APIS)
async def test_an_answer_that_met_its_limit_says_so(chatml_folder: Path, tmp_path: Path, api: str) -> None:
    async with house(chatml_folder, tmp_path, window_tokens=4096, max_new_tokens=20) as one:
        one.script.answer = lambda prompt: (
            "<think>I could go on and on and on about it, and on and on<|im_end|>"
        )
        async with talking(api, one.access["g000001.00"]) as talker:
            heard = await talker.say("next: k7.csv", stream=False)
            assert heard.stop == {"chat": "length", "messages": "max_tokens", "responses": "incomplete"}[api]
            assert (heard.text, heard.tokens[1]) == ("", 20)
            assert heard.reasoning and "about it" not in heard.reasoning
            await talker.say("go on", stream=False)
        assert one.kept.records[1].parent == one.kept.records[0].call


@pytest.mark.parametrize("api", APIS)
async def test_of_answers_that_read_alike_the_one_that_was_meant_goes_on(
    chatml_folder: Path, tmp_path: Path, api: str
) -> None:
    """What was thought tells them apart, or the ids and signatures that a client sends back."""
    thoughts = iter(("One.", "Two."))
    async with house(chatml_folder, tmp_path, window_tokens=4096, max_new_tokens=64) as one:
        one.script.answer = lambda prompt: f"<think>{next(thoughts, 'Three.')}</think>Done.<|im_end|>"
        access = one.access["g000001.00"]
        async with talking(api, access) as first, talking(api, access) as second:
            await first.say("next: k7.csv", stream=False)
            await second.say("next: k7.csv", stream=False)
            await first.say("and?", stream=False)
        records = one.kept.records
        assert [record.parent for record in records] == [None, None, records[0].call]
