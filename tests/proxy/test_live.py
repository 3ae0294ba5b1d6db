"""An answer told while it is sampled says what the complete one says, however its tokens come."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from gyre.proxy.api import Api
from gyre.proxy.api_chat import ChatCompletions
from gyre.proxy.api_messages import Messages
from gyre.proxy.api_responses import Responses
from gyre.proxy.codec import Codec
from gyre.proxy.conversation import CallRequest, Completion, Conversation, Message, unavailable
from gyre.proxy.live import LiveText, Piece
from gyre.proxy.telling import Telling
from tests.proxy.tokenizer_folders import CHATML, write_tokenizer

APIS: tuple[Api, ...] = (ChatCompletions(), Messages(), Responses())
CALL = '<tool_call>{"name": "put", "arguments": {"folder": "d\\u00e4ta"}}</tool_call>'
# What answers are made of: where parts begin and end, what only looks so, spaces, characters of many bytes.
SCRAPS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, CALL.replace("put", "get")),
    *("<thi", "<", "</", "<tool", "\n", "  ", "\t", "å", "🗂️", "日本", "\N{REPLACEMENT CHARACTER}", "\x85"),
    *('{"name": "put"', "}", "I file it.", "x", '{"name": "put", "parameters": {"folder": 1}}'),
    *("<|python_tag|>", "<function=put>", "<parameter=folder>", "</parameter>", "</function>", ";"),
)
# Tool formats, and whether the prompt opens reasoning.
KINDS = (
    ("hermes", False),
    ("hermes", True),
    ("qwen3_coder", False),
    ("llama", False),
    ("smollm2", False),
    ("plain", False),
)


class Cases:
    """A codec for each kind."""

    def __init__(self, folder: Path) -> None:
        turn = "{{- '<|im_start|>assistant\\n' }}{%- endif"
        opening = CHATML.replace(turn, turn.replace("assistant\\n", "assistant\\n<think>\\n"))
        assert opening != CHATML
        folders = write_tokenizer(folder / "plain"), write_tokenizer(folder / "opening", opening)
        self.codecs = [Codec(folders[opened], tool_format) for tool_format, opened in KINDS]
        self.tokenizer = Tokenizer.from_file(str(folders[0] / "tokenizer.json"))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("live"))


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """At those places, which may be the same."""
    ends = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(ends)]


def request(parse_tools: bool) -> CallRequest:
    message = Message(role="user", content=("hi",))
    return CallRequest(
        conversation=Conversation(messages=(message,)), model="m", parse_tools=parse_tools, include_usage=True
    )


def data_of(stream: bytes) -> list[dict[str, Any]]:
    lines = [line for event in stream.decode().split("\n\n") for line in event.split("\n")]
    texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in texts if text != "[DONE]"]


def chat_said(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a client of Chat Completions puts together."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    thought, reason = "", None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            thought += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                assert call["index"] == len(calls)
                calls.append({key: value for key, value in call.items() if key != "index"})
            reason = choice["finish_reason"] or reason
    if thought:
        message["reasoning_content"] = thought
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    return {"choices": [choice], "usage": events[-1]["usage"]}


def messages_said(events: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(answer["content"])
            answer["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = answer["content"][event["index"]], event["delta"]
            assert event["index"] == len(answer["content"]) - 1
            for key in ("text", "thinking", "signature"):
                if key in delta:
                    block[key] += delta[key]
            block["json"] += delta.get("partial_json", "")
        elif event["type"] == "content_block_stop":
            block = answer["content"][event["index"]]
            if text := block.pop("json"):
                block["input"] = json.loads(text)
        elif event["type"] == "message_delta":
            answer |= event["delta"] | {"usage": event["usage"]}
    return answer


def responses_said(events: list[dict[str, Any]]) -> dict[str, Any]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for index, item in enumerate(done):
        mine = [event for event in events if event.get("item_id") == item["id"]]
        said = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        whole = item.get("arguments") or (item.get("content") or item.get("summary"))[0]["text"]
        assert said == (whole if isinstance(whole, str) else "")
        assert {event["output_index"] for event in mine} == {index}
    final: dict[str, Any] = events[-1]["response"]
    assert final["output"] == done
    return final


SAID = (chat_said, messages_said, responses_said)


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[f"{name}-{opened}" for name, opened in KINDS])
@settings(max_examples=60, deadline=None)
@example(scraps=["  ", "x", "\n", CALL, "x"], cuts=[1, 2, 3], spoiled=[], parse_tools=True, is_cut=False)
@example(scraps=["\n", CALL, "x", CALL], cuts=[1, 2], spoiled=[], parse_tools=True, is_cut=True)
@given(
    scraps=st.lists(st.sampled_from(SCRAPS), max_size=9),
    cuts=st.lists(st.integers(0, 400), max_size=40),
    spoiled=st.lists(st.integers(0, 255), max_size=3),
    parse_tools=st.booleans(),
    is_cut=st.booleans(),
)
def test_a_stream_says_what_the_complete_answer_says(
    cases: Cases,
    kind: int,
    scraps: list[str],
    cuts: list[int],
    spoiled: list[int],
    parse_tools: bool,
    is_cut: bool,
) -> None:
    codec = cases.codecs[kind]
    ids = cases.tokenizer.encode("".join(scraps)).ids
    # Tokens of single bytes, anywhere: sampled bytes need not be text.
    for place in spoiled:
        ids.insert(place % (len(ids) + 1), place)
    decoded = codec.decode_answer(ids, "g000001.00-0-0000", parse_tools=parse_tools)
    completion = Completion(
        call="g000001.00-0-0000",
        model="m",
        created_s=1,
        message=decoded.message,
        finish_reason="length" if is_cut else "tool_calls" if decoded.message.tool_calls else "stop",
        prompt_tokens=10,
        completion_tokens=len(ids),
        cached_tokens=8,
        reasoning_tokens=decoded.reasoning_tokens,
    )
    asked = request(parse_tools)
    for api, said in zip(APIS, SAID, strict=True):
        telling = Telling(api.stream(asked), codec.live(parse_tools=parse_tools))
        heard: list[int] = []
        stream = b""
        for chunk in chunks(ids, cuts):
            heard += chunk
            stream += telling.hear(completion, heard)
        stream += telling.end(completion)
        whole = json.loads(api.answer(asked, completion))
        together = said(data_of(stream))
        assert {key: whole[key] for key in together} == together


def pieces(codec: Codec, ids: list[int]) -> list[Piece]:
    live = codec.live()
    return [piece for token in ids for piece in live.hear([token])]


def test_text_is_told_token_by_token(cases: Cases) -> None:
    """But for the space at its end, after which a call would make it none."""
    ids = cases.tokenizer.encode("<think>Where to?</think>I file it. Now.").ids
    told = pieces(cases.codecs[0], ids)
    reasoning = [text for part, text in told if part == "reasoning"]
    text = [text for part, text in told if part == "text"]
    assert ("".join(reasoning), "".join(text)) == ("Where to?", "I file it. Now.")
    assert len(reasoning) > 3 and len(text) > 3


def test_a_brace_amid_an_answer_holds_nothing_back(cases: Cases) -> None:
    """At its beginning it may be a call of Llama's."""
    llama = cases.codecs[KINDS.index(("llama", False))]
    ids = cases.tokenizer.encode("Use {name} as a placeholder.").ids
    assert "".join(text for _, text in pieces(llama, ids)) == "Use {name} as a placeholder."
    assert pieces(llama, cases.tokenizer.encode("{name} is").ids) == []


def test_half_a_character_and_half_a_marker_are_held_back(cases: Cases) -> None:
    live = cases.codecs[0].live()
    path = cases.tokenizer.encode("日").ids
    assert len(path) == 3
    assert [live.hear([token]) for token in path] == [[], [], [("text", "日")]]
    assert live.hear(cases.tokenizer.encode("x <tool_c").ids) == [("text", "x")]
    assert live.hear(cases.tokenizer.encode("ake>").ids) == [("text", " <tool_cake>")]
    assert live.hear(cases.tokenizer.encode("<tool_call>{").ids) == []
    assert live.hear(cases.tokenizer.encode(" not json").ids) == []


def test_a_decoder_that_drops_the_first_space_is_heard_with_what_was_before() -> None:
    decoder = decoders.Metaspace()
    words = ["▁I", "▁file", "▁it", "."]
    text = LiveText(lambda ids: decoder.decode([words[token] for token in ids]), hidden=())
    assert [text.hear([token]) for token in range(4)] == ["I", " file", " it", "."]


def test_bytes_that_are_never_text_are_looked_at_ever_more_rarely(cases: Cases) -> None:
    looks: list[int] = []

    def decode(ids: Any) -> str:
        looks.append(len(ids))
        return cases.codecs[0].decode_text(ids)

    half = cases.tokenizer.encode("日").ids[0]
    text = LiveText(decode, hidden=())
    assert {text.hear([half]) for _ in range(2000)} == {""}
    assert len(looks) < 100


@pytest.mark.parametrize("api", APIS)
def test_a_stream_that_fails_midway_ends_with_an_error(cases: Cases, api: Api) -> None:
    telling = Telling(api.stream(request(True)), cases.codecs[0].live())
    ids = cases.tokenizer.encode("I file").ids
    completion = Completion(
        call="c",
        model="m",
        created_s=1,
        message=Message(role="assistant"),
        finish_reason="stop",
        prompt_tokens=1,
        completion_tokens=1,
    )
    events = data_of(telling.hear(completion, ids) + telling.error(unavailable("later")))
    assert [event.get("type") for event in events].count("response.created") <= 1
    last = events[-1].get("response", events[-1])
    assert "later" in last["error"]["message"]
