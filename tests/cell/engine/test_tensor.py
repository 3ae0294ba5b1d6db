"""What a native engine over several ranks promises beside the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from gyre.cell.engine import EngineFault, KvManifest, SamplingParams
from gyre.cell.engine.memory import is_released
from gyre.cell.weights import RegionWeights
from gyre.rdma import RegionHandle
from tests.cell.engine.calls import chunks_of, generate, joined, prompt, request, until
from tests.cell.engine.conftest import DEVICE, ModelWeights, NativeCase, TensorCase
from tests.cell.engine.followers import Followers

LONG = SamplingParams(seed=1, max_new_tokens=200)
Cases = Callable[[int], TensorCase]
ON_CPU = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="on GPUs the mode wants bfloat16, and NCCL is the group of all other tests"
)


@pytest.fixture
async def over(shm: Path, followers: Followers, native: NativeCase) -> AsyncIterator[Cases]:
    """Engines over so many ranks."""
    made: list[TensorCase] = []
    homes = native.homes

    def of(ranks: int) -> TensorCase:
        made.append(TensorCase("llama", shm, followers, ranks))
        made[-1].homes = homes
        return made[-1]

    yield of
    for case in made:
        await case.close()


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on GPUs by way of host memory: test_staged_kv.py")
async def test_two_ranks_hand_kv_over_to_one_and_one_to_two(over: Cases, native: NativeCase) -> None:
    two, one = await over(2).awake(), await native.awake()
    turn = prompt(40)
    want = await generate(one, turn)

    async def hand_over(first: Any, second: Any, parts: int) -> None:
        manifest: KvManifest = await first.export_kv("s")
        assert [part.heads for part in manifest.parts] == ([(0, 1), (1, 2)] if parts == 2 else [(0, 2)])
        assert await second.import_kv(manifest) == manifest.length_tokens
        assert await first.release_kv(manifest.pin)

    await hand_over(one, two, 1)
    got = await generate(two, turn)
    assert (got.cached_tokens, got.token_ids) == (32, want.token_ids)
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    longer = turn + want.token_ids + prompt(30, seed=1)
    first = await generate(two, longer)
    await hand_over(two, one, 2)
    second = await generate(one, longer)
    assert second.cached_tokens == len(longer) // 8 * 8
    assert second.token_ids == first.token_ids
    assert second.logprobs == pytest.approx(first.logprobs, abs=1e-4)


async def test_more_ranks_than_kv_heads_hold_the_same_ones(over: Cases, native: NativeCase) -> None:
    four, one = await over(4).awake(), await native.awake()
    sampling = SamplingParams(seed=3, max_new_tokens=30)
    want = await generate(one, prompt(40), sampling)
    got = await generate(four, prompt(40), sampling)
    assert got.token_ids == want.token_ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    manifest = await four.export_kv("s")
    assert [part.heads for part in manifest.parts] == [(0, 1), (1, 2)]
    again = await over(4).awake()
    assert await again.import_kv(manifest) == manifest.length_tokens
    assert (await generate(again, prompt(40), sampling)).token_ids == want.token_ids


@ON_CPU
@pytest.mark.parametrize("ranks", [2, 4])
async def test_the_same_bits_whatever_is_in_the_batch(over: Cases, ranks: int) -> None:
    engine = await over(ranks).awake(batch_invariant=True, step_tokens=24)
    asked = [
        request(prompt(3 + 9 * i, seed=i), SamplingParams(seed=i, max_new_tokens=12), call=f"c{i}")
        for i in range(6)
    ]
    together = await asyncio.gather(*(chunks_of(engine, one) for one in asked))
    await engine.sleep()
    await engine.wake(over(ranks).weights(0))
    for one, found in zip(asked, together, strict=True):
        alone = await chunks_of(engine, one)
        assert [chunk.token_ids for chunk in alone] == [chunk.token_ids for chunk in found]
        assert [chunk.logprobs for chunk in alone] == [chunk.logprobs for chunk in found]


@ON_CPU
@pytest.mark.parametrize("batch_invariant", [False, True])
async def test_a_process_group_adds_up_too(
    over: Cases, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL does for GPUs."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    engine = over(2).engine(by_group="gloo", batch_invariant=batch_invariant)
    await engine.wake(over(2).weights(0))
    got = await generate(engine, prompt(20), SamplingParams(max_new_tokens=8))
    want = await generate(await over(2).awake(), prompt(20), SamplingParams(max_new_tokens=8))
    assert got.token_ids == want.token_ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)
    await engine.sleep()
    await engine.wake(over(2).weights(0))
    assert (await generate(engine, prompt(20), SamplingParams(max_new_tokens=8))).token_ids == got.token_ids


# --- life ---------------------------------------------------------------------------------------


async def test_asleep_it_holds_nothing_and_cycles_leave_nothing(over: Cases, followers: Followers) -> None:
    case = over(2)
    engine = await case.awake()
    await generate(engine, prompt(9))

    async def cycle() -> list[int]:
        await engine.sleep()
        assert engine._lead is not None
        assert engine._lead.kv_bytes == 0
        assert all(is_released(parameter) for parameter in engine._lead._runner._model.parameters())
        await engine.wake(case.weights(0))
        await generate(engine, prompt(9), SamplingParams(max_new_tokens=2))
        # Not before: the follower hangs up when it has seen that this rank did.
        return await asyncio.to_thread(followers.things)

    settled = [await cycle() for _ in range(4)][-1]
    after = [await cycle() for _ in range(12)][-1]
    assert after[:2] == settled[:2]
    assert after[2] - settled[2] < 4e6


class HereAlone(ModelWeights, RegionWeights):
    """Others do not find them."""

    def __init__(self, model: PreTrainedModel) -> None:
        ModelWeights.__init__(self, 0, model, bool)
        self.region = RegionHandle(backend="shm", name="weights", nbytes=64)


async def test_weights_that_not_all_ranks_can_read_are_refused(over: Cases) -> None:
    case = over(2)
    engine = case.engine()
    with pytest.raises(TypeError, match="ModelWeights is not in a region"):
        await engine.wake(ModelWeights(0, case.reference(), bool))
    here_alone = HereAlone(case.reference())
    with pytest.raises(RuntimeError, match=r"rank 1: RegionError: .* is gone"):
        await engine.wake(here_alone)
    assert engine.version is None
    await engine.wake(case.weights(0))
    call = asyncio.create_task(chunks_of(engine, request(prompt(5), LONG)))
    await until(engine, lambda metrics: metrics.running > 0, call)
    with pytest.raises(RuntimeError, match="rank 1"):
        await engine.update(here_alone)
    assert joined(await call).finish_reason == "abort"
    assert engine.version is None
    await engine.wake(case.weights(0))
    assert len((await generate(engine, prompt(5))).token_ids) == 20


async def test_a_follower_that_leaves_in_order_is_missed_when_something_is_asked(
    over: Cases, followers: Followers
) -> None:
    engine = await over(2).awake()
    assert engine._lead is not None
    await asyncio.to_thread(followers.forget, str(id(engine)))
    # Its end has been heard when its line's thread has ended.
    (line,) = engine._lead._team.lines  # type: ignore[union-attr]
    assert line._reader is not None
    await asyncio.to_thread(line._reader.join, 20.0)
    assert not engine._lead.lost.done()
    with pytest.raises(EngineFault):
        await generate(engine, prompt(5))
    with pytest.raises(EngineFault, match="lost"):
        await engine.watch()


async def test_a_pass_that_fails_loses_the_engine(over: Cases, followers: Followers) -> None:
    case = over(2)
    engine = await case.awake()
    assert engine._lead is not None
    runner = engine._lead._runner

    def fails(spans: object) -> Any:
        raise MemoryError("no memory for a pass")

    runner.run = fails  # type: ignore[method-assign]
    with pytest.raises(EngineFault, match="no memory for a pass"):
        await generate(engine, prompt(5))
    with pytest.raises(EngineFault, match="no memory for a pass"):
        await engine.watch()
    other = await case.awake()
    assert len((await generate(other, prompt(5))).token_ids) == 20


async def test_a_follower_that_dies_ends_calls_with_a_fault(over: Cases, followers: Followers) -> None:
    case = over(2)
    busy, paused, idle, asleep = [await case.awake() for _ in range(4)]
    calls = [
        asyncio.create_task(chunks_of(engine, request(prompt(5, i), LONG, call=f"c{i}")))
        for i, engine in enumerate((busy, busy, busy, paused))
    ]
    for engine in (busy, paused):
        await until(engine, lambda metrics: metrics.generated_tokens >= 5)
    await paused.pause()
    await asleep.sleep()
    watches = [asyncio.create_task(engine.watch()) for engine in (busy, paused, idle)]
    await asyncio.to_thread(followers.kill)
    async with asyncio.timeout(20.0):
        for watch in watches:
            with pytest.raises(EngineFault, match=r"rank 1 is gone|a pass failed"):
                await watch
        for call in calls:
            with pytest.raises(EngineFault):
                await call
        for engine in (busy, paused, idle):
            with pytest.raises(EngineFault, match="lost"):
                await generate(engine, prompt(5))
            with pytest.raises(EngineFault, match="lost"):
                await engine.update(case.weights(1))
            assert engine.version is None
            await engine.close()
    # Whoever slept needed nobody.
    assert asleep._lead is not None
    assert not asleep._lead.lost.done()
