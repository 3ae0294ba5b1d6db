"""What every engine promises (see `gyre.cell.engine.base`). A new engine joins by a case in conftest.py."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.cell.engine import Chunk, ContextOverflow, EngineAsleep, GenerateRequest, SamplingParams
from tests.cell.engine.calls import GREEDY, VOCAB, chunks_of, generate, joined, prompt, request, until
from tests.cell.engine.conftest import DEVICE, Case

# --- ends ---------------------------------------------------------------------------------------


async def test_stop_tokens_end_the_output_and_are_part_of_it(case: Case) -> None:
    ids = prompt(10)
    free = (await generate(await case.awake(), ids)).token_ids
    at = next(i for i in range(4, 20) if free[i] not in free[:i])
    stopped = await generate(
        await case.awake(), ids, SamplingParams(temperature=0.0, stop_token_ids=(free[at],))
    )
    ended = await generate(await case.awake(eos_token_ids=(free[at],)), ids, GREEDY)
    assert stopped.token_ids == ended.token_ids == free[: at + 1]
    assert stopped.finish_reason == ended.finish_reason == "stop"


async def test_a_stop_token_in_the_prompt_does_not_end_the_call(case: Case) -> None:
    engine = await case.awake()
    ids = prompt(10)
    got = await generate(
        engine, ids, SamplingParams(temperature=0.0, stop_token_ids=ids[-1:], max_new_tokens=1)
    )
    assert len(got.token_ids) == 1


async def test_the_models_end_tokens_can_be_ignored(case: Case) -> None:
    ids = prompt(10)
    free = (await generate(await case.awake(), ids)).token_ids
    engine = await case.awake(eos_token_ids=(free[4],))
    ignoring = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    got = await generate(engine, ids, ignoring)
    assert (got.token_ids, got.finish_reason) == (free, "length")
    named = SamplingParams(temperature=0.0, stop_token_ids=(free[4],), ignore_eos=True)
    assert (await generate(engine, ids, named)).finish_reason == "stop"


async def test_output_ends_with_the_window(case: Case) -> None:
    engine = await case.awake(window_tokens=32)
    got = await generate(engine, prompt(25))
    assert (len(got.token_ids), got.finish_reason) == (7, "length")
    assert len((await generate(engine, prompt(31))).token_ids) == 1


async def test_a_prompt_that_fills_the_window_overflows(case: Case) -> None:
    engine = await case.awake(window_tokens=32)
    with pytest.raises(ContextOverflow) as caught:
        await generate(engine, prompt(32))
    assert (caught.value.prompt_tokens, caught.value.window_tokens) == (32, 32)


async def test_a_call_resumed_where_the_window_ends_ends_at_once(case: Case) -> None:
    engine = await case.awake(window_tokens=32)
    whole = await generate(engine, prompt(25))
    again = await generate(engine, prompt(25) + whole.token_ids, prompt_tokens=25)
    assert (again.token_ids, again.finish_reason) == ((), "length")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_ids": ()}, "prompt_tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 4}, "prompt_tokens"),
        ({"prompt_ids": (1, VOCAB, 2)}, "prompt_ids"),
        ({"prompt_ids": (1, -1, 2)}, "prompt_ids"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(top_k=-1)}, "top_k"),
        ({"sampling": SamplingParams(max_new_tokens=0)}, "max_new_tokens"),
    ],
)
async def test_a_senseless_request_is_refused_by_name(case: Case, fields: dict[str, Any], named: str) -> None:
    engine = await case.awake()
    asked = {"call": "c", "session": "s", "prompt_ids": (1, 2, 3), "prompt_tokens": 3, "sampling": GREEDY}
    with pytest.raises(ValueError, match=named):
        await chunks_of(engine, GenerateRequest(**(asked | fields)))
    assert len((await generate(engine, (1, 2, 3))).token_ids) == 20


async def test_a_call_id_in_use_is_refused(case: Case) -> None:
    engine = await case.awake()
    results = await asyncio.gather(
        generate(engine, prompt(5)), generate(engine, prompt(6)), return_exceptions=True
    )
    assert isinstance(results[1], ValueError)
    assert isinstance(results[0], Chunk)


async def test_calls_answer_whatever_is_asked_of_the_engine_meanwhile(case: Case) -> None:
    engine = await case.awake(seed=0, max_batch=4, kv_tokens=512)
    sampled = SamplingParams(max_new_tokens=24)
    calls = [
        asyncio.create_task(generate(engine, prompt(5 + 3 * i, seed=i % 3), sampled, call=f"c{i}"))
        for i in range(12)
    ]
    asked = [
        engine.pause,
        lambda: engine.update(case.weights(1)),
        engine.resume,
        lambda: engine.abort("c3"),
        engine.pause,
        engine.resume,
        lambda: engine.abort("c11"),
        lambda: engine.update(case.weights(2)),
    ]
    for number, ask in enumerate(asked):
        await until(engine, lambda metrics, enough=20 * number: metrics.generated_tokens >= enough)
        await asyncio.gather(ask(), engine.abort("nobody"))
        await engine.resume()
    for i, call in enumerate(calls):
        got = await call
        assert got.finish_reason == ("length" if len(got.token_ids) == 24 else "abort")
        assert list(got.versions) == sorted(got.versions)
        for version in set(got.versions):
            want = case.logprobs(prompt(5 + 3 * i, seed=i % 3), got.token_ids, seed=version)
            for at, found in enumerate(got.logprobs):
                assert got.versions[at] != version or found == pytest.approx(want[at], abs=case.tolerance)
    assert [len(call.result().token_ids) < 24 for call in calls].count(True) <= 2
    assert engine.metrics().kv_blocks_used == 0


# --- chunks and aborts --------------------------------------------------------------------------


async def test_chunks_come_as_often_as_asked(case: Case) -> None:
    often, seldom = await case.awake(), await case.awake(chunk_interval_s=60.0)
    assert len(await chunks_of(often, request(prompt(5)))) == 20
    # The first token leaves at once.
    assert [len(chunk.token_ids) for chunk in await chunks_of(seldom, request(prompt(5)))] == [1, 19]


async def test_abort_answers_what_was_sampled(case: Case) -> None:
    engine = await case.awake()
    sampling = SamplingParams(seed=1, max_new_tokens=200)
    chunks: list[Chunk] = []
    async for chunk in engine.generate(request(prompt(5), sampling)):
        chunks.append(chunk)
        if len(chunks) == 3:
            await engine.abort("c")
    got = joined(chunks)
    assert got.finish_reason == "abort"
    assert 3 <= len(got.token_ids) < 200
    whole = await generate(engine, prompt(5), sampling)
    assert whole.token_ids[: len(got.token_ids)] == got.token_ids


async def test_abort_keeps_tokens_that_no_chunk_has_told(case: Case) -> None:
    engine = await case.awake(chunk_interval_s=60.0)
    call = asyncio.create_task(chunks_of(engine, request(prompt(5), SamplingParams(max_new_tokens=200))))
    await until(engine, lambda metrics: metrics.generated_tokens >= 5)
    await engine.abort("c")
    got = joined(await call)
    assert got.finish_reason == "abort"
    assert len(got.token_ids) >= 5


async def test_abort_of_an_unknown_call_does_nothing(case: Case) -> None:
    engine = await case.awake()
    await engine.abort("nobody")
    assert (await generate(engine, prompt(5))).finish_reason == "length"


async def test_abort_all_ends_running_and_waiting_calls(case: Case) -> None:
    engine = await case.awake(max_batch=2)
    sampling = SamplingParams(max_new_tokens=200)
    calls = [
        asyncio.create_task(chunks_of(engine, request(prompt(5, i), sampling, call=f"c{i}")))
        for i in range(5)
    ]
    await until(engine, lambda metrics: metrics.running == 2 and metrics.waiting == 3, *calls)
    await engine.abort_all()
    assert {joined(await call).finish_reason for call in calls} == {"abort"}
    assert engine.metrics().running == engine.metrics().waiting == 0


async def test_closing_the_iterator_ends_the_call(case: Case) -> None:
    engine = await case.awake(max_batch=1)
    async with aclosing(engine.generate(request(prompt(5), SamplingParams(max_new_tokens=240)))) as stream:
        async for _ in stream:
            break
    # The same id and the only place are free again.
    assert (await generate(engine, prompt(6))).finish_reason == "length"
    assert engine.metrics().generated_tokens < 240


async def test_a_cancelled_caller_ends_the_call(case: Case) -> None:
    engine = await case.awake()
    call = asyncio.create_task(chunks_of(engine, request(prompt(5), SamplingParams(max_new_tokens=240))))
    await until(engine, lambda metrics: metrics.running > 0, call)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await engine.abort("nobody")
    assert engine.metrics().running == 0


# --- roles and versions -------------------------------------------------------------------------


async def test_an_engine_starts_asleep(case: Case) -> None:
    engine = case.engine()
    assert engine.version is None
    with pytest.raises(EngineAsleep):
        await generate(engine, prompt(5))
    await engine.abort("c")
    await engine.abort_all()
    await engine.sleep()


async def test_sleep_ends_calls_with_what_they_have_and_wake_admits_again(case: Case) -> None:
    engine = await case.awake(seed=0)
    before = await generate(engine, prompt(9))
    call = asyncio.create_task(chunks_of(engine, request(prompt(5), SamplingParams(max_new_tokens=240))))
    await until(engine, lambda metrics: metrics.generated_tokens >= 25)
    await engine.sleep()
    got = joined(await call)
    assert got.finish_reason == "abort"
    assert len(got.token_ids) >= 5
    assert engine.version is None
    with pytest.raises(EngineAsleep):
        await generate(engine, prompt(5))
    await engine.wake(case.weights(0, version=7))
    after = await generate(engine, prompt(9))
    assert after.token_ids == before.token_ids
    assert set(after.versions) == {7}


async def test_update_under_a_call_labels_each_token_with_its_version(case: Case) -> None:
    engine = await case.awake(seed=0)
    ids = prompt(11)
    chunks: list[Chunk] = []
    async for chunk in engine.generate(request(ids, SamplingParams(seed=4, max_new_tokens=80))):
        chunks.append(chunk)
        if len(chunks) == 10:
            await engine.update(case.weights(1))
    got = joined(chunks)
    assert engine.version == 1
    assert len(got.token_ids) == 80
    cut = got.versions.index(1)
    assert got.versions == (0,) * cut + (1,) * (80 - cut)
    assert cut >= 10
    for version, part in ((0, slice(0, cut)), (1, slice(cut, None))):
        want = case.logprobs(ids, got.token_ids, seed=version)[part]
        assert got.logprobs[part] == pytest.approx(want, abs=case.tolerance)


async def test_update_reaches_waiting_calls_too(case: Case) -> None:
    engine = await case.awake(seed=0, max_batch=1)
    calls = [
        asyncio.create_task(
            generate(engine, prompt(20, i), SamplingParams(seed=i, max_new_tokens=30), call=f"c{i}")
        )
        for i in range(3)
    ]
    await until(engine, lambda metrics: metrics.generated_tokens > 0)
    await engine.update(case.weights(1))
    last = (await asyncio.gather(*calls))[-1]
    want = case.logprobs(prompt(20, 2), last.token_ids, seed=1)
    assert set(last.versions) == {1}
    assert last.logprobs == pytest.approx(want, abs=case.tolerance)


async def test_a_failed_load_leaves_the_engine_asleep(case: Case) -> None:
    def broken() -> None:
        raise OSError("snapshot is gone")

    engine = case.engine()
    with pytest.raises(OSError, match="snapshot is gone"):
        await engine.wake(case.weights(0, before=broken))
    assert engine.version is None
    await engine.wake(case.weights(0))
    call = asyncio.create_task(chunks_of(engine, request(prompt(5), SamplingParams(max_new_tokens=240))))
    await until(engine, lambda metrics: metrics.running > 0, call)
    with pytest.raises(OSError, match="snapshot is gone"):
        await engine.update(case.weights(1, before=broken))
    assert joined(await call).finish_reason == "abort"
    assert engine.version is None
    with pytest.raises(EngineAsleep):
        await engine.update(case.weights(1))


async def test_a_slow_load_does_not_block_the_event_loop(case: Case) -> None:
    engine = case.engine()
    go = threading.Event()

    def slow() -> None:
        assert go.wait(30.0)

    waking = asyncio.create_task(engine.wake(case.weights(0, before=slow)))
    await asyncio.sleep(0)
    with pytest.raises(EngineAsleep):
        await generate(engine, prompt(5))
    go.set()
    await waking
    assert engine.version == 0


async def test_metrics_count(case: Case) -> None:
    engine = await case.awake()
    await generate(engine, prompt(40))
    await generate(engine, prompt(40))
    metrics = engine.metrics()
    assert metrics.generated_tokens == 40
    assert metrics.prefilled_tokens + metrics.cached_tokens == 80
    assert metrics.cached_tokens == 32
    assert (metrics.running, metrics.waiting, metrics.kv_blocks_used) == (0, 0, 0)
    assert metrics.kv_blocks_total == 512
    assert metrics.busy_s > 0


async def test_close_ends_calls_and_can_be_repeated(case: Case) -> None:
    engine = await case.awake()
    call = asyncio.create_task(chunks_of(engine, request(prompt(5), SamplingParams(max_new_tokens=240))))
    await until(engine, lambda metrics: metrics.running > 0, call)
    await engine.close()
    assert joined(await call).finish_reason == "abort"
    await engine.close()
    with pytest.raises(EngineAsleep):
        await generate(engine, prompt(5))


async def test_an_engine_that_can_answer_is_watched_in_silence(case: Case) -> None:
    engine = case.engine()
    watch = asyncio.create_task(engine.watch())
    await engine.wake(case.weights(0))
    await generate(engine, prompt(5))
    await engine.sleep()
    assert not watch.done()
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watch


async def test_fifty_cycles_of_sleep_wake_and_update_leave_nothing(case: Case) -> None:
    engine = await case.awake()

    async def cycle(version: int) -> tuple[int, ...]:
        call = asyncio.create_task(chunks_of(engine, request(prompt(9), SamplingParams(max_new_tokens=240))))
        # A server on a busy machine may tell all tokens at once.
        await until(engine, lambda metrics: metrics.running > 0 or call.done())
        await engine.sleep()
        await call
        await engine.wake(case.weights(0, version=version))
        await generate(engine, prompt(9), SamplingParams(max_new_tokens=4))
        await engine.update(case.weights(1, version=version + 1))
        await generate(engine, prompt(9), SamplingParams(max_new_tokens=4))
        return threading.active_count(), len(os.listdir("/proc/self/fd")), resident_bytes(), device_bytes()

    counts = [await cycle(2 * number) for number in range(55)]
    # The least of five: an ended call's connection may be open a moment longer than the call.
    before, after = (tuple(map(min, zip(*part, strict=True))) for part in (counts[:5], counts[-5:]))
    # Of threads and descriptors there may be fewer: in all of the first cycles such a connection was open.
    assert after[0] <= before[0] and after[1] <= before[1]
    assert after[2] - before[2] < 8e6
    # Less than a page of a driver's.
    assert after[3] - before[3] < 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def device_bytes() -> int:
    """In use on a GPU, by all processes."""
    if DEVICE.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free
