"""What every engine promises of the tokens and log-probabilities that it samples, with and without KV that
was there already."""

from __future__ import annotations

import asyncio

import pytest

from gyre.cell.engine import SamplingParams
from tests.cell.engine.calls import chunks_of, generate, joined, prompt, request
from tests.cell.engine.conftest import Case

# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
async def test_greedy_tokens_are_the_most_likely(case: Case, length: int) -> None:
    engine = await case.awake()
    ids = prompt(length)
    got = await generate(engine, ids, SamplingParams(temperature=0.0, max_new_tokens=30))
    assert got.token_ids == case.greedy(ids, 30)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, max_new_tokens=40),
        SamplingParams(temperature=1.0, max_new_tokens=40),
        SamplingParams(temperature=0.7, top_k=12, top_p=0.9, seed=3, max_new_tokens=40),
    ],
)
async def test_logprobs_are_of_the_whole_distribution_at_the_temperature(
    case: Case, sampling: SamplingParams
) -> None:
    engine = await case.awake()
    ids = prompt(21)
    got = await generate(engine, ids, sampling)
    want = case.logprobs(ids, got.token_ids, sampling.temperature or 1.0)
    assert got.logprobs == pytest.approx(want, abs=case.tolerance)


async def test_long_prompts_computed_in_parts_give_the_same_numbers(case: Case) -> None:
    engine = await case.awake(step_tokens=16)
    ids = prompt(75)
    got = await generate(engine, ids)
    want = case.logprobs(ids, got.token_ids)
    assert got.logprobs == pytest.approx(want, abs=case.tolerance)


# --- randomness ---------------------------------------------------------------------------------


async def test_a_call_gets_the_same_tokens_alone_and_in_a_batch(case: Case) -> None:
    asked = [
        request(
            prompt(3 + 5 * i, seed=i),
            SamplingParams(seed=i, max_new_tokens=24, temperature=(0.0, 1.0, 1.3)[i % 3], top_k=20 * (i % 2)),
            call=f"c{i}",
        )
        for i in range(9)
    ]
    engine = await case.awake()
    together = await asyncio.gather(*(chunks_of(engine, one) for one in asked))
    other = await case.awake()
    alone = [await chunks_of(other, one) for one in asked]
    assert [joined(c).token_ids for c in together] == [joined(c).token_ids for c in alone]


async def test_a_seed_repeats_and_another_differs(case: Case) -> None:
    engine = await case.awake()
    outputs = [
        (
            await generate(engine, prompt(9), SamplingParams(seed=seed, temperature=2.0, max_new_tokens=12))
        ).token_ids
        for seed in (1, 1, 2)
    ]
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("cut", [1, 6, 7, 15, 29])
async def test_a_resumed_call_continues_as_if_never_interrupted(case: Case, cut: int) -> None:
    sampling = SamplingParams(seed=5, temperature=1.2, max_new_tokens=30)
    ids = prompt(10)
    first, second = await case.awake(), await case.awake()
    whole = await generate(first, ids, sampling)
    rest = await generate(second, ids + whole.token_ids[:cut], sampling, prompt_tokens=len(ids))
    assert rest.token_ids == whole.token_ids[cut:]
    assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=case.tolerance)
    assert rest.finish_reason == "length"


async def test_a_call_resumed_after_its_last_token_ends_at_once(case: Case) -> None:
    engine = await case.awake()
    ids = prompt(10)
    whole = await generate(engine, ids)
    again = await generate(engine, ids + whole.token_ids, prompt_tokens=len(ids))
    assert (again.token_ids, again.finish_reason) == ((), "length")
    stopping = SamplingParams(stop_token_ids=(whole.token_ids[2],))
    again = await generate(engine, ids + whole.token_ids[:3], stopping, prompt_tokens=len(ids))
    assert (again.token_ids, again.finish_reason) == ((), "stop")


# --- prefix reuse and KV ------------------------------------------------------------------------


async def test_a_known_prefix_is_not_computed_again_and_changes_nothing(case: Case) -> None:
    sampling = SamplingParams(seed=2, max_new_tokens=10)
    engine = await case.awake()
    ids = prompt(50)
    first = await generate(engine, ids, sampling)
    again = await generate(engine, ids, sampling)
    assert first.cached_tokens == 0
    assert again.cached_tokens == 48
    assert again.token_ids == first.token_ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=case.tolerance)


async def test_the_next_turn_finds_prompt_and_answer(case: Case) -> None:
    engine = await case.awake()
    turn = prompt(20)
    answer = await generate(engine, turn)
    longer = turn + answer.token_ids + prompt(9, seed=1)
    got = await generate(engine, longer)
    # All but the last sampled token have KV: 20 + 19 of it, in blocks of 8.
    assert got.cached_tokens == 32
    want = case.logprobs(longer, got.token_ids)
    assert got.logprobs == pytest.approx(want, abs=case.tolerance)


async def test_calls_that_start_together_compute_their_prefix_once(case: Case) -> None:
    engine = await case.awake()
    ids = prompt(64)
    got = await asyncio.gather(
        *(
            generate(engine, (*ids, i), SamplingParams(seed=i, max_new_tokens=4), call=f"c{i}")
            for i in range(6)
        )
    )
    assert sorted(chunk.cached_tokens for chunk in got) == [0] + [64] * 5


async def test_kv_of_another_version_is_never_used(case: Case) -> None:
    engine = await case.awake(seed=0)
    ids = prompt(40)
    await generate(engine, ids)
    await engine.update(case.weights(1))
    got = await generate(engine, ids)
    assert got.cached_tokens == 0
    want = case.logprobs(ids, got.token_ids, seed=1)
    assert got.logprobs == pytest.approx(want, abs=case.tolerance)
    await engine.sleep()
    await engine.wake(case.weights(0))
    assert (await generate(engine, ids)).cached_tokens == 0


@pytest.mark.parametrize("kv_tokens", [56, 112])
async def test_many_calls_in_a_small_pool_all_finish_as_if_alone(case: Case, kv_tokens: int) -> None:
    asked = [
        request(prompt(4 + 3 * i, seed=i), SamplingParams(seed=i, max_new_tokens=24), call=f"c{i}")
        for i in range(10)
    ]
    roomy = await case.awake()
    want = [joined(await chunks_of(roomy, one)).token_ids for one in asked]
    engine = await case.awake(kv_tokens=kv_tokens)
    got = [joined(c) for c in await asyncio.gather(*(chunks_of(engine, one) for one in asked))]
    assert [chunk.token_ids for chunk in got] == want
    assert engine.metrics().preemptions > 0
    assert engine.metrics().kv_blocks_used == 0
