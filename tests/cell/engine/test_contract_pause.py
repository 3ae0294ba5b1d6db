"""What every engine promises about `pause` and `resume`."""

from __future__ import annotations

import asyncio

import pytest

from gyre.cell.engine import Engine, SamplingParams
from tests.cell.engine.calls import chunks_of, generate, joined, prompt, request, until
from tests.cell.engine.conftest import Case

LONG = SamplingParams(seed=1, max_new_tokens=240)


async def paused_call(engine: Engine) -> asyncio.Task[list[object]]:
    """A call that has sampled something and samples no more."""
    call = asyncio.create_task(chunks_of(engine, request(prompt(5), LONG)))
    await until(engine, lambda metrics: metrics.generated_tokens >= 5)
    await engine.pause()
    return call  # type: ignore[return-value]


async def idle(engine: Engine) -> None:
    """Gives an engine that is not paused the time for several tokens."""
    for _ in range(20):
        await engine.abort("nobody")
        await asyncio.sleep(0.001)


async def test_a_pause_holds_calls_and_a_resume_goes_on_as_if_there_was_none(case: Case) -> None:
    engine = await case.awake()
    call = await paused_call(engine)
    held = engine.metrics().generated_tokens
    await idle(engine)
    assert engine.metrics().generated_tokens == held < 240
    assert not call.done()
    await engine.resume()
    got = joined(await call)
    assert (len(got.token_ids), got.finish_reason) == (240, "length")
    assert got.token_ids == (await generate(await case.awake(), prompt(5), LONG)).token_ids


async def test_new_calls_wait_while_it_is_paused(case: Case) -> None:
    engine = await case.awake()
    await engine.pause()
    call = asyncio.create_task(generate(engine, prompt(5)))
    await until(engine, lambda metrics: metrics.waiting == 1)
    await idle(engine)
    assert engine.metrics().generated_tokens == 0
    await engine.resume()
    assert len((await call).token_ids) == 20


async def test_abort_works_while_it_is_paused(case: Case) -> None:
    engine = await case.awake()
    call = await paused_call(engine)
    waiting = asyncio.create_task(chunks_of(engine, request(prompt(6), LONG, call="w")))
    await until(engine, lambda metrics: metrics.running + metrics.waiting == 2)
    await engine.abort("c")
    got = joined(await call)
    assert got.finish_reason == "abort"
    assert 5 <= len(got.token_ids) < 240
    await engine.abort_all()
    assert joined(await waiting).finish_reason == "abort"
    await engine.resume()
    assert len((await generate(engine, prompt(5))).token_ids) == 20


async def test_an_update_while_it_is_paused_leaves_it_so(case: Case) -> None:
    engine = await case.awake(seed=0)
    call = await paused_call(engine)
    held = engine.metrics().generated_tokens
    await engine.update(case.weights(1))
    assert engine.version == 1
    await idle(engine)
    assert engine.metrics().generated_tokens == held
    await engine.resume()
    got = joined(await call)
    assert got.versions == (0,) * held + (1,) * (240 - held)
    want = case.logprobs(prompt(5), got.token_ids, seed=1)[held:]
    assert got.logprobs[held:] == pytest.approx(want, abs=case.tolerance)


async def test_a_sleep_ends_the_pause_and_what_is_paused(case: Case) -> None:
    engine = await case.awake()
    call = await paused_call(engine)
    await engine.sleep()
    assert joined(await call).finish_reason == "abort"
    await engine.wake(case.weights(1))
    assert len((await generate(engine, prompt(5))).token_ids) == 20


async def test_pause_and_resume_may_come_twice_or_while_it_sleeps(case: Case) -> None:
    engine = case.engine()
    await engine.pause()
    await engine.resume()
    await engine.pause()
    await engine.wake(case.weights(0))
    assert len((await generate(engine, prompt(5))).token_ids) == 20
    await engine.resume()
    await engine.pause()
    await engine.pause()
    await engine.resume()
    assert len((await generate(engine, prompt(5))).token_ids) == 20
