"""Calls to an engine, for the tests of engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from gyre.cell.engine import Chunk, Engine, EngineMetrics, GenerateRequest, SamplingParams

VOCAB = 97
# Between two looks at an engine. One in another process needs the processor meanwhile.
PAUSE_S = 0.0
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB) for _ in range(length))


def request(
    ids: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    call: str = "c",
    session: str = "s",
    prompt_tokens: int | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        call=call,
        session=session,
        prompt_ids=tuple(ids),
        prompt_tokens=len(ids) if prompt_tokens is None else prompt_tokens,
        sampling=sampling,
    )


async def chunks_of(engine: Engine, asked: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """The chunks of a call as one; checks that only the last has a finish reason."""
    assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    whole = Chunk(
        token_ids=tuple(t for chunk in chunks for t in chunk.token_ids),
        logprobs=tuple(p for chunk in chunks for p in chunk.logprobs),
        versions=tuple(v for chunk in chunks for v in chunk.versions),
        kv_versions=tuple(v for chunk in chunks for v in chunk.kv_versions or chunk.versions),
        finish_reason=chunks[-1].finish_reason,
        cached_tokens=chunks[-1].cached_tokens,
    )
    assert len(whole.token_ids) == len(whole.logprobs) == len(whole.versions) == len(whole.kv_versions)
    assert {chunk.cached_tokens for chunk in chunks} == {whole.cached_tokens}
    return whole


async def generate(
    engine: Engine, ids: Sequence[int], sampling: SamplingParams = GREEDY, **fields: Any
) -> Chunk:
    return joined(await chunks_of(engine, request(ids, sampling, **fields)))


async def until(engine: Engine, reached: Callable[[EngineMetrics], bool], *calls: asyncio.Task[Any]) -> None:
    """Waits by asking the engine: each round trip lets it go on. Raises where one of `calls` ends before."""
    while not reached(engine.metrics()):
        for call in calls:
            if call.done():
                raise AssertionError(f"a call ended before: {call.result()}")
        await engine.abort("nobody")
        await asyncio.sleep(PAUSE_S)
