from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.proxy.tool_formats import Hermes

CALL = '<tool_call>{"name": "put", "arguments": {"folder": "data"}}</tool_call>'
hermes = Hermes()


def test_a_call_alone_leaves_no_content() -> None:
    answer = hermes.parse(f"\n{CALL}\n")
    assert answer.content == ""
    assert [(call.name, call.arguments) for call in answer.calls] == [("put", {"folder": "data"})]
    assert answer.malformed == 0


def test_raw_text_of_a_call_is_kept_as_sampled() -> None:
    raw = '<tool_call>\n{"arguments":{"folder":  "data"},"name":"put"}\n</tool_call>'
    assert hermes.parse(f"I file it. {raw}").calls[0].raw == raw


def test_text_around_calls_is_content() -> None:
    answer = hermes.parse(f"First. {CALL}\n{CALL} Done.")
    assert answer.content == "First.\nDone."
    assert len(answer.calls) == 2


def test_text_without_calls_is_content_unchanged() -> None:
    assert hermes.parse("  done \n") == ("  done \n", (), 0)


def test_a_closing_tag_inside_an_argument_does_not_cut_the_call() -> None:
    arguments = {"text": "a </tool_call> b <tool_call>"}
    block = f"<tool_call>{json.dumps({'name': 'write', 'arguments': arguments})}</tool_call>"
    assert hermes.parse(block).calls[0].arguments == arguments


@pytest.mark.parametrize(
    "block",
    [
        '<tool_call>{"name": "put", "arguments": {"folder": </tool_call>',
        '<tool_call>{"name": "put", "arguments": {}}',
        '<tool_call>{"name": "put"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "put", "arguments": "data"}</tool_call>',
        '<tool_call>{"name": "put", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "put", "arguments": {"x": "\\ud800"}}</tool_call>',
        '<tool_call>["put"]</tool_call>',
        '<tool_call>{"name": "put", "arguments": {}} trailing</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>",
        '<tool_call>{"name": "put", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}</tool_call>",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_a_malformed_call_is_content_and_counted(block: str) -> None:
    assert hermes.parse(block) == (block, (), 1)


def test_a_good_call_behind_a_malformed_one_is_still_a_call() -> None:
    answer = hermes.parse(f"<tool_call>{{oops {CALL}")
    assert (answer.content, len(answer.calls), answer.malformed) == ("<tool_call>{oops", 1, 1)


@given(st.text(alphabet=st.sampled_from(list('<>/{}[]":, \nabtool_callnameargumentsput0')), max_size=60))
def test_any_text_is_parsed(text: str) -> None:
    hermes.parse(text)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", CALL, "{", "x", " "])))
def test_all_text_is_accounted_for(pieces: list[str]) -> None:
    text = "".join(pieces)
    answer = hermes.parse(text)
    shown = answer.content + "".join(call.raw for call in answer.calls)
    assert sorted(shown.replace(" ", "").replace("\n", "")) == sorted(text.replace(" ", "").replace("\n", ""))


def test_a_written_call_is_parsed_back() -> None:
    written = hermes.write_call("put", {"folder": "dáta"})
    assert hermes.parse(written).calls[0][:2] == ("put", {"folder": "dáta"})
