"""What every engine promises about what it has sampled, whoever has it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec

from gyre.cell.engine import Engine, SampledLeg, SamplingParams
from tests.cell.engine.calls import chunks_of, generate, joined, prompt, request, until
from tests.cell.engine.conftest import Case

LONG = SamplingParams(seed=1, max_new_tokens=200)


def leg(call: str, tokens: int, stay: int = 0) -> SampledLeg:
    return SampledLeg(call=call, stay=stay, tokens=tokens)


async def first_chunk_of(engine: Engine, call: str, session: str = "s") -> int:
    """The tokens of a call's first chunk; then nobody listens any more."""
    async with aclosing(engine.generate(request(prompt(6), LONG, call=call, session=session))) as chunks:  # type: ignore[type-var]
        return len((await anext(chunks)).token_ids)


async def test_it_tells_what_it_sampled_call_by_call_and_again_until_it_is_to_forget(case: Case) -> None:
    engine = await case.awake()
    first = await generate(engine, prompt(5), call="a")
    second = await generate(engine, prompt(7), SamplingParams(max_new_tokens=3), call="b")
    await generate(engine, prompt(7), call="c", session="another")
    expected = (leg("a", len(first.token_ids)), leg("b", len(second.token_ids)))
    assert await engine.end_session("s") == expected
    assert await engine.end_session("s") == expected
    engine.forget_session("s")
    assert await engine.end_session("s") == ()
    assert [its.call for its in await engine.end_session("another")] == ["c"]


async def test_of_a_resumed_call_what_was_sampled_here_is_told(case: Case) -> None:
    engine = await case.awake()
    asked = msgspec.structs.replace(request(prompt(9), prompt_tokens=5), stay=2)
    await chunks_of(engine, asked)
    assert await engine.end_session("s") == (leg("c", 16, stay=2),)


async def test_calls_end_with_their_session_and_no_token_is_untold(case: Case) -> None:
    engine = await case.awake(chunk_interval_s=3600.0)
    call = asyncio.create_task(chunks_of(engine, request(prompt(5), LONG)))
    await until(engine, lambda metrics: metrics.generated_tokens >= 5, call)
    (told,) = await engine.end_session("s")
    got = joined(await call)
    assert got.finish_reason == "abort"
    assert told == leg("c", len(got.token_ids))
    assert engine.metrics().generated_tokens == told.tokens


async def test_what_nobody_listened_to_is_told(case: Case) -> None:
    engine = await case.awake()
    heard = await first_chunk_of(engine, "a")
    await until(engine, lambda metrics: metrics.running + metrics.waiting == 0)
    (told,) = await engine.end_session("s")
    assert told.tokens == engine.metrics().generated_tokens >= heard


async def test_it_tells_what_it_sampled_while_it_sleeps_and_when_it_is_awake_again(case: Case) -> None:
    engine = await case.awake()
    call = asyncio.create_task(chunks_of(engine, request(prompt(5), LONG)))
    await until(engine, lambda metrics: metrics.generated_tokens >= 5, call)
    await engine.sleep()
    told = await engine.end_session("s")
    assert told == (leg("c", len(joined(await call).token_ids)),)
    await engine.wake(case.weights(1))
    assert await engine.end_session("s") == told
    engine.forget_session("s")
    assert await engine.end_session("s") == ()
