from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.proxy.tool_formats import TOOL_FORMATS, Hermes, SampledAnswer, ToolFormat, looks_like
from gyre.proxy.tool_text import is_object

CALL = '<tool_call>{"name": "put", "arguments": {"folder": "data"}}</tool_call>'
CODER = "<tool_call>\n<function=put>\n<parameter=folder>\ndata\n</parameter>\n</function>\n</tool_call>"
LLAMA = '{"name": "put", "parameters": {"folder": "data"}}'
SMOLLM2 = '<tool_call>[{"name": "put", "arguments": {"folder": "data"}}]</tool_call>'
CALLS = {"hermes": CALL, "qwen3_coder": CODER, "llama": LLAMA, "smollm2": SMOLLM2}
PUT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "put",
        "parameters": {
            "type": "object",
            "properties": {
                "folder": {"type": "string"},
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "deep": {"type": "boolean"},
                "names": {"type": "array"},
                "more": {"type": "object"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "either": {"type": ["string", "null"]},
            },
        },
    },
}
hermes, coder, llama, smollm2 = (TOOL_FORMATS[name] for name in CALLS)


def named(answer: SampledAnswer) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in answer.calls]


# --- all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_a_call_alone_leaves_no_content(name: str) -> None:
    answer = TOOL_FORMATS[name].parse(f"\n{CALLS[name]}\n", [PUT])
    assert answer.content == ""
    assert named(answer) == [("put", {"folder": "data"})]
    assert (answer.parsed, answer.malformed) == (1, 0)


@pytest.mark.parametrize("name", CALLS)
def test_text_without_calls_is_content_unchanged(name: str) -> None:
    assert TOOL_FORMATS[name].parse("  done \n") == ("  done \n", (), 0)


@pytest.mark.parametrize("name", CALLS)
def test_written_calls_are_parsed_back(name: str) -> None:
    calls = [("put", {"folder": "dáta\n<b>"}), ("put", {"folder": "x", "count": 3, "names": ["a"]})]
    written = TOOL_FORMATS[name].write_calls(calls)
    assert named(TOOL_FORMATS[name].parse(written, [PUT])) == calls


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_cut_off_is_told_as_it_was_sampled(name: str) -> None:
    """Harnesses say to the model that arguments are no JSON; a text without a call would end the run."""
    cut = CALLS[name][: CALLS[name].index("data") + 2]
    answer = TOOL_FORMATS[name].parse(cut, [PUT])
    ((tool, arguments),) = named(answer)
    assert tool == "put" and isinstance(arguments, str) and arguments.endswith("da")
    assert not is_object(arguments)
    assert (answer.parsed, answer.malformed, answer.content) == (0, 1, "")


@pytest.mark.parametrize("name", CALLS)
def test_which_format_a_text_is_in_is_known(name: str) -> None:
    assert looks_like(CALLS[name], [PUT]) == name
    assert looks_like("I have filed it.", [PUT]) is None


pieces = st.lists(
    st.sampled_from(
        [
            *CALLS.values(),
            *("<tool_call>", "</tool_call>", "<function=put>", "</function>", "<parameter=folder>"),
            *("</parameter>", "<|python_tag|>", '{"name": "put"', '"parameters": {', "[", "{", "}", ";"),
            *("x", " ", "\n"),
        ]
    ),
    max_size=8,
)


@given(st.sampled_from([*TOOL_FORMATS]), pieces)
def test_all_text_is_accounted_for(name: str, pieces: list[str]) -> None:
    """Nothing of a text is lost, and what was told of it while it came is how it begins."""
    text, its = "".join(pieces), TOOL_FORMATS[name]
    answer = its.parse(text, [PUT])
    shown = answer.content + "".join(call.raw for call in answer.calls)
    between = str.maketrans("", "", " \n;" if name == "llama" else " \n")
    assert sorted(shown.translate(between)) == sorted(text.translate(between))
    broken = [call.arguments for call in answer.calls if isinstance(call.arguments, str)]
    assert len(broken) <= answer.malformed
    assert not any(is_object(arguments) for arguments in broken)
    told = held = ""
    for character in text[:-1]:
        held += character
        certain = its.certain(held, bool(told))
        told, held = told + held[: certain.characters], held[certain.characters :]
        if certain.ends:
            break
    assert answer.content.startswith(told)


@given(
    st.sampled_from([*TOOL_FORMATS]),
    st.text(
        alphabet=st.sampled_from(list('<>/{}[]":;, \nabtool_callnameargumentsfunction=pyh|')), max_size=80
    ),
)
def test_any_text_is_parsed(name: str, text: str) -> None:
    TOOL_FORMATS[name].parse(text, [PUT])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "<parameter=a>" * 10_000,
        "<tool_call><function=f>" + "<parameter=a>\n" * 10_000,
        "{" * 9999,
    ],
    ids=len,
)
@pytest.mark.parametrize("its", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
def test_what_never_ends_takes_no_time(its: ToolFormat, text: str) -> None:
    its.parse(f"<tool_call>{text}")


# --- Hermes -------------------------------------------------------------------------------------


def test_raw_text_of_a_call_is_kept_as_sampled() -> None:
    raw = '<tool_call>\n{"arguments":{"folder":  "data"},"name":"put"}\n</tool_call>'
    assert hermes.parse(f"I file it. {raw}").calls[0].raw == raw


def test_text_around_calls_is_content() -> None:
    answer = hermes.parse(f"First. {CALL}\n{CALL} Done.")
    assert answer.content == "First.\nDone."
    assert len(answer.calls) == 2


def test_a_closing_tag_inside_an_argument_does_not_cut_the_call() -> None:
    arguments = {"text": "a </tool_call> b <tool_call>"}
    block = f"<tool_call>{json.dumps({'name': 'write', 'arguments': arguments})}</tool_call>"
    assert hermes.parse(block).calls[0].arguments == arguments


@pytest.mark.parametrize(
    "block",
    [
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>["put"]</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>",
        '<tool_call>{"arguments": {"name": "put", </tool_call>',
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_a_malformed_call_that_names_no_tool_is_content_and_counted(block: str) -> None:
    assert hermes.parse(block) == (block, (), 1)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "put", "arguments": {"folder": </tool_call>', '{"folder":'),
        ('{"name": "put", "arguments": {}}', "{}}"),
        ('{"name": "put", "arguments": {"a": 1}</tool_call>', '{"name": "put", "arguments": {"a": 1}'),
        ('{"name": "put"}</tool_call>', '<tool_call>{"name": "put"}</tool_call>'),
        ('{"name": "put", "arguments": "data"}</tool_call>', '"data"}'),
        ('{"name": "put", "arguments": {"x": NaN}}</tool_call>', '{"x": NaN}}'),
        ('{"name": "put", "arguments": {"x": "\\ud800"}}</tool_call>', '{"x": "\\ud800"}}'),
        ('{"name": "put", "arguments": {}} trailing</tool_call>', "{}} trailing"),
        ('{"name": "put", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}</tool_call>", None),
    ],
)
def test_a_malformed_call_reaches_the_harness_as_it_was_sampled(body: str, arguments: str | None) -> None:
    answer = hermes.parse(f"<tool_call>{body}")
    ((name, shown),) = named(answer)
    assert name == "put" and isinstance(shown, str) and not is_object(shown)
    assert arguments in (None, shown)
    assert (answer.malformed, answer.content) == (1, "")


def test_a_good_call_behind_a_malformed_one_is_still_a_call() -> None:
    answer = hermes.parse(f"<tool_call>{{oops {CALL}")
    assert (answer.content, len(answer.calls), answer.malformed) == ("<tool_call>{oops", 1, 1)


# --- Qwen3-Coder --------------------------------------------------------------------------------


def written(**values: str) -> str:
    inside = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=put>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("folder", "12", "12"),
        ("folder", "", ""),
        ("folder", " a\nb ", " a\nb "),
        ("count", "12", 12),
        ("count", "many", "many"),
        ("count", "true", "true"),
        ("share", "0.5", 0.5),
        ("share", "2", 2),
        ("deep", "True", True),
        ("deep", "maybe", "maybe"),
        ("names", '["a", 1]', ["a", 1]),
        ("names", '{"a": 1}', '{"a": 1}'),
        ("more", '{"a": [true]}', {"a": [True]}),
        ("more", '{"a": ' + "[" * 100 + "]" * 100 + "}", None),
        ("maybe", "null", None),
        ("maybe", "3", 3),
        ("either", "null", None),
        ("either", "nullable", "nullable"),
        ("unknown", "3", "3"),
    ],
)
def test_values_are_what_the_schema_says(name: str, value: str, read: Any) -> None:
    """Parsers gave the wrong types (vllm#23099, vllm#30439)."""
    ((_, arguments),) = named(coder.parse(written(**{name: value}), [PUT]))
    assert arguments == {name: value if read is None and value[0] == "{" else read}


def test_without_a_schema_all_values_are_text() -> None:
    assert named(coder.parse(written(count="3"))) == [("put", {"count": "3"})]


def test_a_value_may_hold_tags() -> None:
    text = "print('</parameter>')\n<function=f>\n</tool_call> <parameter>"
    assert named(coder.parse(written(folder=text, count="1"), [PUT])) == [
        ("put", {"folder": text, "count": 1})
    ]


def test_a_missing_closing_tag_of_a_parameter_is_none_of_its_value() -> None:
    """Values ran into each other (vllm#25028)."""
    text = "<tool_call><function=put><parameter=folder>\ndata\n<parameter=count>\n2\n</function></tool_call>"
    assert named(coder.parse(text, [PUT])) == [("put", {"folder": "data", "count": 2})]


def test_a_function_without_the_tag_around_it_is_a_call() -> None:
    """One in five was shown as text, and the run ended (ollama#16686, ollama PR 17742)."""
    answer = coder.parse("I file it.\n<function=put>\n</function>\n</tool_call>\nDone.", [PUT])
    assert (named(answer), answer.content) == ([("put", {})], "I file it.\nDone.")


@pytest.mark.parametrize("tools", [[], [PUT]])
def test_a_text_about_functions_calls_none(tools: list[Any]) -> None:
    """Examples in an explanation were called (ollama PR 16398)."""
    text = (
        "Write <function=get_weather>\n<parameter=city>\nTokyo\n</parameter>\n</function>, or <function=..."
    )
    assert coder.parse(text, tools) == (text, (), 0)


@pytest.mark.parametrize("body", ["<function=put>\nfolder=data\n</function>", "<function=put>{}</function>"])
def test_a_function_without_parameter_tags_is_malformed(body: str) -> None:
    answer = coder.parse(f"<tool_call>{body}</tool_call>", [PUT])
    ((name, arguments),) = named(answer)
    assert name == "put" and arguments in body and not is_object(arguments)
    assert answer.malformed == 1


# --- Llama, SmolLM2 -----------------------------------------------------------------------------


def test_several_calls_of_llama_have_semicolons_between() -> None:
    answer = llama.parse(f"<|python_tag|>{LLAMA}; {LLAMA.replace('data', 'docs')}")
    assert named(answer) == [("put", {"folder": "data"}), ("put", {"folder": "docs"})]
    assert llama.parse(f"{LLAMA}\n{LLAMA}").parsed == 2
    assert llama.parse(f"I file it. <|python_tag|>{LLAMA}").content == "I file it."


@pytest.mark.parametrize("text", ['{"name": "Ann", "age": 3}', '{"a": 1}', f"As you see: {LLAMA}", "{"])
def test_an_answer_in_json_is_no_call_of_llama(text: str) -> None:
    assert llama.parse(text) == (text, (), 0)


def test_a_list_of_calls_of_smollm2_is_several() -> None:
    both = '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]'
    answer = smollm2.parse(f"<tool_call>{both}</tool_call>")
    assert named(answer) == [("a", {}), ("b", {"x": 1})]
    assert "".join(call.raw for call in answer.calls) == f"<tool_call>{both}</tool_call>"
    assert smollm2.parse(CALL).parsed == 1


def test_a_list_with_something_else_in_it_is_malformed() -> None:
    answer = smollm2.parse('<tool_call>[{"name": "a", "arguments": {}}, 3]</tool_call>')
    assert (answer.parsed, answer.malformed) == (0, 1)
    assert smollm2.parse("<tool_call>[]</tool_call>").malformed == 1


def test_a_policy_without_tools_calls_none() -> None:
    assert TOOL_FORMATS["plain"].parse(CALL) == (CALL, (), 0)
    assert isinstance(hermes, Hermes)
