from __future__ import annotations

import asyncio

import msgspec
import pytest

from benchmarks.proxy.calls import Added
from benchmarks.proxy.engine import Pace
from benchmarks.proxy.load import Calls, read_answer, said
from benchmarks.proxy.words import text, words

PACE = Pace(ids=(1, 2), tokens=10, first_s=0.5, token_s=0.1, chunk_s=0.3)


def test_the_first_token_leaves_at_once_and_others_together() -> None:
    assert [(round(at, 3), *which) for at, *which in PACE.chunks(99)] == [
        (0.5, 0, 1),
        (0.8, 1, 4),
        (1.1, 4, 7),
        (1.4, 7, 10),
    ]
    assert round(PACE.seconds, 3) == 1.4
    assert [which for _, *which in PACE.chunks(2)] == [[0, 1], [1, 2]]
    at_once = msgspec.structs.replace(PACE, first_s=0.0, token_s=0.0)
    assert list(at_once.chunks(99)) == [(0.0, 0, 10)]


def event(text: str) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"delta": {"content": text}}]}) + b"\n\n"


async def test_answers_are_read_whole_and_streamed() -> None:
    head = b"HTTP/1.1 200 OK\r\n"
    whole = msgspec.json.encode({"choices": [{"message": {"content": "filed"}}]})
    streamed = [event("fi"), event("led") + b"data: [DONE]\n\n"]
    reader = asyncio.StreamReader()
    reader.feed_data(head + b"Content-Length: %d\r\n\r\n" % len(whole) + whole)
    reader.feed_data(head + b"Transfer-Encoding: chunked\r\n\r\n")
    for piece in streamed:
        reader.feed_data(b"%x\r\n%s\r\n" % (len(piece), piece))
    reader.feed_data(b"0\r\n\r\n" + b"HTTP/1.1 503 x\r\n\r\n")
    reader.feed_eof()
    at, answer = await read_answer(reader)
    assert at > 0 and said(answer, stream=False) == "filed"
    later, answer = await read_answer(reader)
    assert later >= at and answer == b"".join(streamed) and said(answer, stream=True) == "filed"
    with pytest.raises(AssertionError, match="503"):
        await read_answer(reader)


def test_what_is_added_is_the_difference_of_percentiles() -> None:
    direct = Calls(seconds=[1.0] * 99 + [2.0], first_bytes={}, first_byte_s=[])
    through = Calls(seconds=[1.5] * 98 + [4.0] * 2, first_bytes={}, first_byte_s=[])
    added = Added(through, direct)
    assert (added.p50_s, round(added.p99_s, 2)) == (0.5, 2.99)


def test_texts_are_of_words_that_are_all_different() -> None:
    assert len(set(words())) == len(words())
    assert text(5, 1).split() == text(5, 1).split() != text(5, 2).split()
    assert len(text(5, 1).split()) == 5
