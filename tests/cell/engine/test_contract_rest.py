"""What every engine promises about KV that rests in host memory while it sleeps: `rest_kv`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from gyre.cell.engine import (
    Engine,
    EngineAsleep,
    KvManifest,
    KvUnavailable,
    SamplingParams,
    Weights,
    unpack_ids,
)
from gyre.rdma import RegionError
from tests.cell.engine.calls import generate, prompt, until
from tests.cell.engine.conftest import DEVICE, Case, TensorCase

pytestmark = pytest.mark.needs("kv")

MIB = 2**20
ONE = SamplingParams(max_new_tokens=1)


async def fall_asleep(engine: Engine, *sessions: str, budget_s: float = 10.0) -> tuple[str, ...]:
    rested = await engine.rest_kv(sessions, budget_s)
    metrics = engine.metrics()
    assert metrics.kv_bytes_resting == rested.nbytes
    assert (metrics.kv_blocks_pinned, metrics.kv_blocks_used) == (0, 0)
    await engine.sleep()
    return rested.sessions


async def wake(engine: Engine, weights: Weights) -> None:
    await engine.wake(weights)
    assert engine.metrics().kv_bytes_resting == 0


def resting_files(case: Case) -> list[Path]:
    return [path for path in case.regions.folder.iterdir() if "-rest-" in path.name]


def given_back(case: Case) -> bool:
    """What a GPU has locked stays."""
    return DEVICE.type == "cuda" or resting_files(case) == []


@pytest.fixture(autouse=True)
def skip_what_is_over_several_gpus(case: Case) -> None:
    if DEVICE.type == "cuda" and isinstance(case, TensorCase):
        pytest.skip("of ranks that are one engine over several GPUs nothing rests")


async def test_sessions_go_on_where_they_were_after_a_sleep(case: Case) -> None:
    engine = await case.awake(kv_rest_bytes=MIB)
    sampling = SamplingParams(seed=3, temperature=1.1, max_new_tokens=20)
    want = await generate(engine, prompt(40), sampling)
    other = await generate(engine, prompt(60, seed=1), sampling, session="t")
    assert await fall_asleep(engine, "t", "s", "nobody") == ("t", "s")
    assert sum(path.stat().st_blocks for path in resting_files(case)) > 0
    await wake(engine, case.weights(0))
    # 40 + 19 and 60 + 19 tokens.
    assert engine.metrics().kv_tokens_put_back == engine.metrics().kv_tokens_rested == 56 + 72
    for ids, session, before, cached in ((prompt(40), "s", want, 32), (prompt(60, seed=1), "t", other, 56)):
        got = await generate(engine, ids, sampling, session=session)
        assert (got.cached_tokens, got.token_ids) == (cached, before.token_ids)
        assert got.logprobs == pytest.approx(before.logprobs, abs=case.tolerance)
    assert engine.metrics().kv_rests_dropped == 0
    assert given_back(case)


async def test_another_engine_takes_over_from_one_that_sleeps(case: Case) -> None:
    first, second = await case.awake(kv_rest_bytes=MIB), await case.awake()
    want = await generate(first, prompt(40))
    assert await fall_asleep(first, "s") == ("s",)
    with pytest.raises(EngineAsleep):
        await first.export_kv("nobody")
    manifest = await first.export_kv("s")
    assert unpack_ids(manifest.tokens) == (prompt(40) + want.token_ids)[:56]
    assert await second.import_kv(manifest) == 56
    assert await first.release_kv(manifest.pin)
    assert not await first.release_kv(manifest.pin)
    got = await generate(second, prompt(40))
    assert (got.cached_tokens, got.token_ids) == (32, want.token_ids)
    assert got.logprobs == pytest.approx(want.logprobs, abs=case.tolerance)
    # It goes on there.
    assert first.metrics().kv_bytes_resting == 0
    assert given_back(case)
    with pytest.raises(EngineAsleep):
        await first.export_kv("s")
    with pytest.raises((RegionError, KvUnavailable)):
        await (await case.awake()).import_kv(manifest)
    await wake(first, case.weights(0))
    assert (await generate(first, prompt(40))).cached_tokens == 0


@pytest.mark.parametrize("on_publish", ["recompute", "keep"])
async def test_kv_of_older_weights_is_dropped_or_marked(case: Case, on_publish: str) -> None:
    engine = await case.awake(kv_rest_bytes=MIB, on_publish=on_publish)
    await generate(engine, prompt(40), ONE)
    assert await fall_asleep(engine, "s") == ("s",)
    await wake(engine, case.weights(1))
    metrics, kept = engine.metrics(), on_publish == "keep"
    assert (metrics.kv_rests_dropped, metrics.kv_tokens_put_back) == ((0, 40) if kept else (1, 0))
    longer = (*prompt(40), 5)
    got = await generate(engine, longer, SamplingParams(max_new_tokens=4))
    assert got.versions == (1,) * 4
    assert (got.cached_tokens, got.kv_versions) == ((40, (0,) * 4) if kept else (0, (1,) * 4))
    if not kept:
        want = case.logprobs(longer, got.token_ids, seed=1)
        assert got.logprobs == pytest.approx(want, abs=case.tolerance)
        return
    # To nobody else.
    assert (await generate(engine, longer, ONE, session="t")).cached_tokens == 0


async def test_kv_that_rests_is_of_no_use_to_other_weights(case: Case) -> None:
    first, second = await case.awake(kv_rest_bytes=MIB), await case.awake(1)
    await generate(first, prompt(40))
    await fall_asleep(first, "s")
    manifest = await first.export_kv("s")
    with pytest.raises(KvUnavailable, match="version"):
        await second.import_kv(manifest)
    assert await first.release_kv(manifest.pin)


async def test_memory_that_changed_while_it_rested_is_not_served(case: Case) -> None:
    first, second = await case.awake(kv_rest_bytes=MIB), await case.awake()
    await generate(first, prompt(40), ONE)
    await generate(first, prompt(60, seed=1), ONE, session="t")
    await fall_asleep(first, "t", "s")
    manifest = await first.export_kv("s")
    for path in resting_files(case):
        np.memmap(path, np.uint8, "r+")[100] ^= 1  # in the first block that was copied
    manifest_of_t = await first.export_kv("t")
    with pytest.raises(KvUnavailable, match="other bytes"):
        await second.import_kv(manifest_of_t)
    assert await second.import_kv(manifest) == 40
    assert (await generate(second, prompt(60, seed=1), ONE, session="t")).cached_tokens == 0
    await wake(first, case.weights(0))
    assert (await generate(first, prompt(60, seed=1), ONE, session="t")).cached_tokens == 0
    assert (await generate(first, prompt(40), ONE)).cached_tokens == 32
    metrics = first.metrics()
    assert (metrics.kv_rests_dropped, metrics.kv_blocks_used, metrics.kv_blocks_pinned) == (1, 0, 0)


async def test_what_is_read_when_it_wakes_does_not_count(case: Case) -> None:
    first, second = await case.awake(kv_rest_bytes=MIB), await case.awake()
    await generate(first, prompt(40), ONE)
    await fall_asleep(first, "s")
    manifest = await first.export_kv("s")
    await wake(first, case.weights(0))
    with pytest.raises((RegionError, KvUnavailable)):
        await second.import_kv(manifest)
    assert not await first.release_kv(manifest.pin)
    assert second.metrics().kv_blocks_used == 0


async def test_no_more_rests_than_may(case: Case) -> None:
    """The latest sessions, and what they share once; of the last what fits of it."""
    engine = await case.awake(kv_rest_bytes=MIB)
    for session, tail in (("a", 20), ("b", 30), ("c", 40)):
        await generate(engine, (*prompt(40), *prompt(tail, seed=tail)), ONE, session=session)
    each = (await engine.rest_kv(["c"], 10.0)).nbytes // 10
    assert (await engine.rest_kv(["c", "b", "a"], 10.0)).nbytes == (10 + 3 + 2) * each
    assert (await engine.rest_kv(["c", "b", "a"], 0.0)).sessions == ()
    small = await case.awake(kv_rest_bytes=11 * each + each // 2)
    for session, tail in (("a", 20), ("b", 30), ("c", 40)):
        await generate(small, (*prompt(40), *prompt(tail, seed=tail)), ONE, session=session)
    rested = await small.rest_kv(["c", "b", "a"], 10.0)
    assert (rested.sessions, rested.tokens, rested.nbytes) == (("c", "b"), 80 + 48, 11 * each)


async def test_an_engine_that_does_not_sleep_after_all_gives_it_back(case: Case) -> None:
    engine = await case.awake(kv_rest_bytes=MIB)
    await generate(engine, prompt(40), ONE)
    assert (await engine.rest_kv(["s"], 10.0)).sessions == ("s",)
    assert (await generate(engine, prompt(40), ONE)).cached_tokens == 32
    assert engine.metrics().kv_bytes_resting == 0
    assert given_back(case)


async def test_nothing_rests_where_that_is_off_or_where_it_sleeps(case: Case) -> None:
    engine = await case.awake()
    with pytest.raises(KvUnavailable, match="kv_rest_bytes is 0"):
        await engine.rest_kv(["s"], 1.0)
    await engine.sleep()
    with pytest.raises(EngineAsleep):
        await engine.rest_kv(["s"], 1.0)


async def test_a_pin_of_what_rests_ends_by_itself(case: Case) -> None:
    engine = await case.awake(kv_rest_bytes=MIB)
    await generate(engine, prompt(40), ONE)
    await fall_asleep(engine, "s")
    manifest: KvManifest = await engine.export_kv("s", lease_s=0.02)
    async with asyncio.timeout(5.0):
        await until(engine, lambda metrics: metrics.kv_bytes_resting == 0)
    assert not await engine.release_kv(manifest.pin)
    await engine.close()
    assert resting_files(case) == []


@pytest.fixture
def a_block_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is larger than what is copied at a time."""
    monkeypatch.setattr("gyre.cell.engine.kv_moves.STEP_BYTES", 1)
    monkeypatch.setattr("gyre.cell.engine.kv_rest.STEP_BYTES", 1)


@pytest.mark.usefixtures("a_block_a_step")
async def test_a_hand_over_that_ends_while_it_wakes_takes_no_memory_away(case: Case) -> None:
    engine = await case.awake(kv_rest_bytes=MIB)
    await generate(engine, prompt(70), ONE)
    await fall_asleep(engine, "s")
    manifest = await engine.export_kv("s")
    waking = asyncio.create_task(engine.wake(case.weights(0)))
    async with asyncio.timeout(5.0):
        await until(engine, lambda metrics: metrics.kv_blocks_used > 0 or waking.done())
    assert not waking.done()
    assert await engine.release_kv(manifest.pin)
    await waking
    assert engine.metrics().kv_bytes_resting == 0
    assert (await generate(engine, prompt(70), ONE)).cached_tokens == 64
    assert given_back(case)


@pytest.mark.usefixtures("a_block_a_step")
async def test_a_call_that_comes_while_it_wakes_is_answered(case: Case) -> None:
    engine = await case.awake(kv_rest_bytes=MIB)
    await generate(engine, prompt(70), ONE)
    await fall_asleep(engine, "s")
    waking = asyncio.create_task(engine.wake(case.weights(0)))
    async with asyncio.timeout(5.0):
        await until(engine, lambda metrics: metrics.kv_blocks_used > 0 or waking.done())
    assert not waking.done()
    got = await generate(engine, prompt(20, seed=1), ONE, session="t")
    await waking
    assert got.versions == (0,)
    assert engine.metrics().kv_tokens_put_back == 64
    assert (await generate(engine, prompt(70), ONE)).cached_tokens == 64
    assert given_back(case)


@pytest.mark.usefixtures("a_block_a_step")
@pytest.mark.parametrize("what", ["a call", "a sleep", "its end"])
async def test_whoever_comes_while_it_is_taken_ends_that(case: Case, what: str) -> None:
    engine = await case.awake(kv_rest_bytes=MIB)
    for session in range(3):
        await generate(engine, prompt(70, seed=session), ONE, session=f"s{session}")
    taking = asyncio.create_task(engine.rest_kv(["s2", "s1", "s0"], 10.0))
    async with asyncio.timeout(5.0):
        await until(engine, lambda metrics: metrics.kv_bytes_resting > 0 or taking.done())
    assert not taking.done()
    if what == "a call":
        assert (await generate(engine, prompt(70), ONE, session="s0")).cached_tokens == 64
    else:
        await (engine.sleep() if what == "a sleep" else engine.close())
    with pytest.raises(KvUnavailable, match="no KV is to rest any more"):
        await taking
    metrics = engine.metrics()
    assert (metrics.kv_bytes_resting, metrics.kv_blocks_pinned) == (0, 0)
    assert given_back(case)
    if what == "a sleep":
        await wake(engine, case.weights(0))
        greedy = SamplingParams(temperature=0.0, max_new_tokens=1)
        assert (await generate(engine, prompt(70), greedy)).token_ids == case.greedy(prompt(70), 1)


async def test_bytes_of_a_session_that_was_taken_over_do_not_rest(case: Case) -> None:
    """What it shared with one that rests does."""
    engine = await case.awake(kv_rest_bytes=MIB)
    for session, tail in (("a", 20), ("b", 30)):
        await generate(engine, (*prompt(40), *prompt(tail, seed=tail)), ONE, session=session)
    each = (await engine.rest_kv(["a"], 10.0)).nbytes // 7
    rested = await engine.rest_kv(["b", "a"], 10.0)
    await engine.sleep()
    assert rested.nbytes == (8 + 2) * each
    manifest = await engine.export_kv("b")
    assert await engine.release_kv(manifest.pin)
    assert engine.metrics().kv_bytes_resting == 7 * each
    await wake(engine, case.weights(0))
