"""How the pieces that a SGLang server tells become chunks."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from gyre.cell.engine.base import Chunk, ContextOverflow, EngineFault, SamplingParams
from gyre.cell.engine.sglang_call import Call
from gyre.cell.engine.sglang_counts import Counts
from gyre.cell.engine.sglang_request import Requests
from tests.cell.engine.calls import request
from tests.cell.engine.test_sglang_wire import event


def call(interval_s: float = 0.0, stop_ids: frozenset[int] = frozenset()) -> Call:
    made = Call(request((1, 2, 3)), stop_ids, interval_s)
    made.send("first")
    return made


async def chunks_of(call: Call) -> list[Chunk]:
    async with aclosing(call.chunks()) as chunks:
        return [chunk async for chunk in chunks]


async def test_each_token_is_a_chunk_and_the_end_comes_with_the_last() -> None:
    made = call()
    assert [made.feed(event([5], 1)), made.feed(event([6, 7], 3))] == [1, 2]
    made.finish("abort")
    got = await chunks_of(made)
    told = [(chunk.token_ids, chunk.finish_reason) for chunk in got]
    assert told == [((5,), None), ((6,), None), ((7,), "abort")]
    assert {chunk.cached_tokens for chunk in got} == {8}


async def test_pieces_within_an_interval_are_one_chunk() -> None:
    made = call(interval_s=60.0)
    task = asyncio.create_task(chunks_of(made))
    await asyncio.sleep(0)
    made.feed(event([4], 1))
    # The first leaves at once.
    for _ in range(5):
        await asyncio.sleep(0)
    made.feed(event([5], 2))
    await asyncio.sleep(0)
    made.feed(event([6], 3, finish_reason={"type": "stop", "matched": 6}))
    told = [(chunk.token_ids, chunk.finish_reason) for chunk in await task]
    assert told == [((4,), None), ((5, 6), "stop")]


async def test_a_held_call_tells_its_end_alone() -> None:
    made = call()
    made.hold(True)
    task = asyncio.create_task(chunks_of(made))
    made.feed(event([5], 1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    made.finish("abort")
    [chunk] = await task
    assert (chunk.token_ids, chunk.finish_reason) == ((5,), "abort")


async def test_what_came_before_a_fault_is_told_before_it() -> None:
    made = call()
    made.feed(event([5], 1))
    made.fail(EngineFault("gone"))
    told: list[Chunk] = []
    with pytest.raises(EngineFault, match="gone"):
        async for chunk in made.chunks():
            told.append(chunk)
    assert [chunk.token_ids for chunk in told] == [(5,)]
    assert made.feed(event([6], 2)) == 0


ABORTED = {"type": "abort", "message": "", "status_code": None}


async def test_a_recalled_call_is_sent_again_with_what_it_has() -> None:
    made = call()
    made.feed(event([5], 1))
    made.recalled = True
    made.feed(event([6], 2, finish_reason=ABORTED))
    assert (made.back, made.sent, made.ended.is_set()) == (True, False, False)
    assert made.so_far.prompt_ids == (1, 2, 3, 5, 6)
    made.send("second")
    made.feed(event([7], 1, finish_reason={"type": "length", "length": 1}))
    got = await chunks_of(made)
    assert [token for chunk in got for token in chunk.token_ids] == [5, 6, 7]
    assert got[-1].finish_reason == "length"
    assert made.reading.retractions == 1


async def test_an_abort_that_was_not_a_recall_is_the_end() -> None:
    made = call()
    made.recalled = True
    made.feed(event([5], 1, finish_reason=ABORTED))
    made.send("second")
    made.feed(event([6], 1, finish_reason=ABORTED))
    assert [chunk.finish_reason for chunk in await chunks_of(made)] == [None, "abort"]


async def test_a_recalled_call_may_end_by_itself() -> None:
    made = call()
    made.recalled = True
    made.feed(event([5], 1, finish_reason={"type": "stop", "matched": 5}))
    assert made.settled.is_set() and not made.back
    assert [chunk.finish_reason for chunk in await chunks_of(made)] == ["stop"]


async def test_a_stop_token_that_the_server_does_not_know_ends_the_call() -> None:
    made = call(stop_ids=frozenset({6}))
    made.feed(event([5, 6, 7], 3))
    told = [(chunk.token_ids, len(chunk.logprobs), chunk.finish_reason) for chunk in await chunks_of(made)]
    assert told == [((5,), 1, None), ((6,), 1, "stop")]
    assert made.stopped_early


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (SamplingParams(max_new_tokens=9), {"max_new_tokens": 7, "top_k": -1, "stop_token_ids": [50]}),
        (SamplingParams(max_new_tokens=90, top_k=4), {"max_new_tokens": 11, "top_k": 4}),
        (SamplingParams(seed=-1), {"sampling_seed": 2**63 - 1}),
        (SamplingParams(stop_token_ids=(7,), ignore_eos=True), {"ignore_eos": True}),
    ],
)
def test_requests_in_its_words(sampling: SamplingParams, wanted: dict[str, Any]) -> None:
    requests = Requests(16, 97, frozenset({50}))
    asked = request((1, 2, 3, 8, 9), sampling, prompt_tokens=3)
    requests.check(asked)
    body = requests.body(asked, "rid")
    assert body["sampling_params"] | wanted == body["sampling_params"]
    assert requests.stops_here(asked) == (frozenset({7}) if sampling.ignore_eos else frozenset())


def test_a_request_is_checked_before_the_server_sees_it() -> None:
    requests = Requests(16, 97, frozenset({50}))
    with pytest.raises(ContextOverflow):
        requests.check(request((1,) * 16))
    with pytest.raises(ValueError, match="prompt_ids has 1 to 97"):
        requests.check(request((1, 97)))


def test_a_call_resumed_after_its_end() -> None:
    requests = Requests(16, 97, frozenset({50}))
    ignoring = SamplingParams(ignore_eos=True)
    assert requests.over_already(request((1, 50), prompt_tokens=1)) == "stop"
    assert requests.over_already(request((1, 50), ignoring, prompt_tokens=1)) is None
    assert requests.over_already(request((1, 50), prompt_tokens=2)) is None
    assert (
        requests.over_already(request((1, 2), SamplingParams(max_new_tokens=1), prompt_tokens=1)) == "length"
    )
    assert requests.over_already(request(tuple(range(16)), prompt_tokens=8)) == "length"
    requests.check(request(tuple(range(16)), prompt_tokens=8))


def test_many_calls_are_told_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("gyre.cell.engine.sglang_call.time.monotonic", lambda: now_s)
    counts = Counts(16, 64)
    assert counts.tokens_together(0.05, 1) == 1
    made = call()
    made.feed(event([5], 1))
    for number in range(2, 101):
        now_s += 0.01
        made.feed(event([5], number))
    counts.over(made)
    assert counts.tokens_together(0.05, 1) == 5
    assert counts.tokens_together(0.05, 100) == 25
    assert counts.tokens_together(0.0, 100) == 1
