from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gyre.proxy.codec import Codec
from gyre.proxy.reasoning import split_reasoning
from tests.proxy.tokenizer_folders import CHATML, write_tokenizer

CALL = '<tool_call>{"name": "put", "arguments": {"folder": "data"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("Done.", None, "Done."),
        ("<think>\nHm.\n</think>\n\nDone.", "Hm.", "Done."),
        (" <think>Hm.</think>", "Hm.", ""),
        ("<think>\n\n</think>\n\nDone.", None, "Done."),
        ("<think>cut o", "cut o", ""),
        ("Close it with </think>.", None, "Close it with </think>."),
        ("I say <think>x</think>", None, "I say <think>x</think>"),
        ("<think>a</think>b</think>", "a", "b</think>"),
    ],
)
def test_what_was_thought_is_apart(text: str, reasoning: str | None, answer: str) -> None:
    assert split_reasoning(text, opened=False) == (reasoning, answer)


def test_where_the_prompt_opened_it_there_is_no_opening_tag() -> None:
    assert split_reasoning("Hm.\n</think>\n\nDone.", opened=True) == ("Hm.", "Done.")
    assert split_reasoning("<think>Hm.</think>Done.", opened=True) == ("Hm.", "Done.")
    assert split_reasoning("cut o", opened=True) == ("cut o", "")


@given(st.lists(st.sampled_from(["<think>", "</think>", "x", " ", "\n"])).map("".join), st.booleans())
def test_nothing_but_space_and_tags_is_lost(text: str, opened: bool) -> None:
    reasoning, answer = split_reasoning(text, opened=opened)
    assert (reasoning or "").count("x") + answer.count("x") == text.count("x")


def ids_of(folder: Path, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


def test_a_template_that_opens_the_reasoning_is_known(tmp_path: Path) -> None:
    opening = CHATML.replace(
        "add_generation_prompt %}{{- '<|im_start|>assistant\\n",
        "add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n",
    )
    assert opening != CHATML
    codec = Codec(write_tokenizer(tmp_path, opening))
    message = codec.decode_answer(ids_of(tmp_path, f"Hm {CALL}</think>{CALL}"), "c").message
    assert (message.reasoning, message.text, len(message.tool_calls)) == (f"Hm {CALL}", "", 1)


def test_a_call_that_is_only_thought_about_is_none(codec: Codec, chatml_folder: Path) -> None:
    answer = codec.decode_answer(ids_of(chatml_folder, f"<think>maybe {CALL}</think>Done."), "c")
    assert (answer.message.tool_calls, answer.malformed) == ((), 0)
    assert codec.decode_answer(ids_of(chatml_folder, f"<think>{CALL}"), "c").raw_calls == {}


@pytest.mark.parametrize("is_token", [False, True])
def test_reasoning_tokens_are_those_up_to_the_closing_tag(tmp_path: Path, is_token: bool) -> None:
    write_tokenizer(tmp_path)
    if is_token:
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        tokenizer.add_special_tokens(["<think>", "</think>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = Codec(tmp_path)
    thought, rest = ids_of(tmp_path, "<think>put it there</think>"), ids_of(tmp_path, "\n\ndone")
    answer = codec.decode_answer([*thought, *rest], "c")
    assert (answer.message.reasoning, answer.message.text) == ("put it there", "done")
    assert answer.reasoning_tokens == len(thought)
    assert codec.decode_answer(thought[:-1], "c").reasoning_tokens == len(thought) - 1
    assert codec.decode_answer(rest, "c").reasoning_tokens == 0
