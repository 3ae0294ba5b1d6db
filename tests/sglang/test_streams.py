"""Calls of whose tokens a server tells several at a time, as often as chunks are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gyre.cell.engine import SamplingParams
from tests.cell.engine.calls import chunks_of, joined, prompt, request, until
from tests.sglang.conftest import SglangCase

LONG = SamplingParams(temperature=0.0, max_new_tokens=200)
# Far longer than a token takes.
INTERVAL_S = 0.2


async def test_an_update_under_calls_whose_tokens_come_together(
    make_case: Callable[..., SglangCase],
) -> None:
    """The first call tells how fast tokens come; each token of the next has its version, and is the one that
    those weights want after those before."""
    case = make_case("llama")
    engine = await case.awake(chunk_interval_s=INTERVAL_S)
    chunks = await chunks_of(engine, request(prompt(9), LONG))
    assert joined(chunks).token_ids == case.greedy(prompt(9), 200)

    call = asyncio.create_task(chunks_of(engine, request(prompt(9), LONG)))
    await until(engine, lambda metrics: metrics.generated_tokens > 200 + 1, call)
    await engine.update(case.weights(1, version=1))
    chunks = await call
    assert len(chunks) < 200 / 3
    got = joined(chunks)
    before = got.versions.count(0)
    assert 1 < before < 200
    assert got.versions == (0,) * before + (1,) * (200 - before)
    assert got.token_ids[:before] == case.greedy(prompt(9), before)
    rest = case.greedy((*prompt(9), *got.token_ids[:before]), 200 - before, seed=1)
    assert got.token_ids[before:] == rest
