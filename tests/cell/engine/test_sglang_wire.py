"""What a SGLang server says is taken as it is or refused by name; nothing else comes out of it."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.cell.engine.base import EngineFault
from gyre.cell.engine.sglang_versions import OLDEST, check_version, parse_version
from gyre.cell.engine.sglang_wire import Answer, Events, Reading, ServerInfo, decode, used_tokens


def event(ids: list[int], done: int, **meta: Any) -> bytes:
    """An answer with new tokens `ids`, `done` of the call in all."""
    logprobs = [[-0.5 - token, token, None] for token in ids]
    known = {"completion_tokens": done, "weight_version": "3", "output_token_logprobs": logprobs}
    return json.dumps({"output_ids": ids, "meta_info": known | {"cached_tokens": 8} | meta}).encode()


def test_pieces_of_a_call() -> None:
    reading = Reading("c")
    first = reading.take(event([5, 6], 2))
    assert (first.token_ids, first.logprobs, first.versions) == ((5, 6), (-5.5, -6.5), (3, 3))
    assert first.finish_reason is None
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    last = reading.take(
        event(
            [7],
            3,
            weight_version="4",
            weight_versions=spans,
            finish_reason={"type": "length", "length": 3},
            routed_experts=base64.b64encode(b"\1\0\0\0").decode(),
            num_retractions=1,
        )
    )
    assert (last.token_ids, last.versions, last.finish_reason) == ((7,), (4,), "length")
    assert last.routed_experts == b"\1\0\0\0"
    assert (reading.tokens, reading.cached_tokens, reading.retractions) == (3, 8, 1)


def test_versions_that_change_after_they_were_told_are_a_fault() -> None:
    reading = Reading("c")
    reading.take(event([5], 1))
    spans = [{"version": "4", "start": 0, "end": 2}]
    with pytest.raises(EngineFault, match=r"weight_versions are \[4, 4\], told before as \[3\], with 1 new"):
        reading.take(event([6], 2, weight_versions=spans, finish_reason={"type": "stop"}))


def test_an_abort_in_the_queue_tells_its_last_token_again() -> None:
    reading = Reading("c")
    reading.take(event([5, 6], 2))
    whole = [[-5.5, 5, None], [-6.5, 6, None]]
    got = reading.take(
        event([6], 2, output_token_logprobs=whole, finish_reason={"type": "abort", "message": "in queue"})
    )
    assert (got.token_ids, got.finish_reason) == ((), "abort")


def test_an_abort_in_the_queue_comes_with_what_was_not_told_yet() -> None:
    reading = Reading("c")
    reading.take(event([5], 1))
    # The server has put two answers together: the one with 6 and 7, and the abort with 7 once more.
    whole = [[-6.5, 6, None], [-7.5, 7, None], [-5.5, 5, None], [-6.5, 6, None], [-7.5, 7, None]]
    body = json.loads(event([6, 7, 7], 3, output_token_logprobs=whole, finish_reason={"type": "abort"}))
    got = reading.take(json.dumps(body).encode())
    assert (got.token_ids, got.logprobs, got.finish_reason) == ((6, 7), (-6.5, -7.5), "abort")


@pytest.mark.parametrize(
    ("meta", "named"),
    [
        ({"completion_tokens": 5}, "completion_tokens went from 0 to 5"),
        ({"completion_tokens": -1}, "completion_tokens"),
        ({"output_token_logprobs": [[-1.0, 9, None]]}, "output_token_logprobs are of"),
        ({"output_token_logprobs": [[None, 5, None]]}, "a log-probability is None"),
        ({"output_token_logprobs": [[1.0, 5, None]]}, "a log-probability is 1.0"),
        ({"output_token_logprobs": "x"}, "not understood"),
        ({"weight_version": None}, "weight_version is None"),
        ({"weight_version": "default"}, "weight_version is 'default'"),
        ({"weight_version": "-1"}, "weight_version is '-1'"),
        ({"weight_versions": []}, "weight_versions are"),
        ({"weight_versions": [{"version": "2", "start": 1, "end": 1}]}, "weight_versions are"),
        ({"finish_reason": {"type": "abort", "status_code": 503, "message": "full"}}, "503 full"),
        ({"finish_reason": {"type": "odd"}}, "finish_reason is 'odd'"),
        ({"finish_reason": {}}, "not understood"),
        ({"routed_experts": "?!"}, "not base64"),
    ],
)
def test_what_does_not_fit_is_named(meta: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineFault, match=named):
        Reading("c").take(event([5], 1, **meta))


def test_an_error_of_the_request_is_the_callers_and_another_is_the_servers() -> None:
    refused = json.dumps({"error": {"message": "too long", "code": 400}}).encode()
    with pytest.raises(ValueError, match="too long"):
        Reading("c").take(refused)
    with pytest.raises(EngineFault, match="out of memory"):
        Reading("c").take(json.dumps({"error": {"message": "out of memory", "code": 500}}).encode())


def test_what_a_server_holds_of_a_device_is_told_per_rank() -> None:
    states = [{"memory_usage": {"weight": 1.5, "kvcache": 2.5, "graph": {}}}]
    info = decode(json.dumps({"version": "1", "internal_states": states}).encode(), ServerInfo, "test")
    assert info.held_bytes == 4 << 30
    assert decode(b'{"version": "1"}', ServerInfo, "test").held_bytes == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "finish_reason",
    "completion_tokens",
    "cached_tokens",
    "num_retractions",
    "weight_version",
    "weight_versions",
    "output_token_logprobs",
    "routed_experts",
]


@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_understood_or_a_fault(data: bytes) -> None:
    for kind in (Answer, ServerInfo):
        try:
            decode(data, kind, "test")
        except EngineFault as fault:
            assert "test is not understood" in str(fault)
    try:
        assert isinstance(used_tokens(data), int)
    except EngineFault as fault:
        assert "/v1/loads" in str(fault)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3), st.lists(JSON, max_size=3))
def test_any_answer_gives_whole_pieces_or_a_fault_that_names_the_call(
    meta: dict[str, Any], ids: list[Any]
) -> None:
    body = json.loads(event([5], 1))
    body["meta_info"] |= meta
    body["output_ids"] = ids or body["output_ids"]
    try:
        piece = Reading("call-7").take(json.dumps(body).encode())
    except EngineFault as fault:
        assert "call-7" in str(fault) or "answer to /generate" in str(fault)
    else:
        assert len(piece.token_ids) == len(piece.logprobs) == len(piece.versions)
        assert all(logprob <= 0 for logprob in piece.logprobs)


@given(st.lists(st.dictionaries(st.text(max_size=4), st.integers(), max_size=2)), st.integers(1, 7))
def test_events_come_whole_however_they_are_cut(events: list[dict[str, int]], size: int) -> None:
    stream = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events) + b"data: [DONE]\n\n"
    cutter = Events()
    got = [one for at in range(0, len(stream), size) for one in cutter.feed(stream[at : at + size])]
    assert [json.loads(one) for one in got] == events
    assert cutter.done
    assert list(cutter.feed(b"data: {}\n\n")) == []


@given(st.text(max_size=24))
def test_a_version_is_numbers_or_refused(text: str) -> None:
    try:
        assert len(parse_version(text)) in (3, 4)
    except ValueError as error:
        assert "is no version of SGLang" in str(error)


def test_versions() -> None:
    assert parse_version("0.5.10.post1") == (0, 5, 10, 1)
    assert parse_version("0.5.23+cu130") == (0, 5, 23)
    check_version(".".join(map(str, OLDEST)))
    with pytest.raises(ValueError, match=r"0\.5\.10\.post1 is too old: Gyre needs 0\.5\.11"):
        check_version("0.5.10.post1")
