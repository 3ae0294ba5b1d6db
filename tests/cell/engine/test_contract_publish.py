"""What every engine promises about KV when weights of a newer version come."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from gyre.cell.engine import Chunk, Engine, KvUnavailable, SamplingParams
from tests.cell.engine.calls import chunks_of, generate, joined, prompt, request, until
from tests.cell.engine.conftest import Case

pytestmark = pytest.mark.needs("kv")

ONE = SamplingParams(temperature=0.0, max_new_tokens=1)


async def over_an_update(case: Case, engine: Engine, ids: tuple[int, ...]) -> Chunk:
    """A call of 100 tokens during which version 1 comes."""
    call = asyncio.create_task(chunks_of(engine, request(ids, SamplingParams(seed=3, max_new_tokens=100))))
    await until(engine, lambda metrics: metrics.generated_tokens >= 20, call)
    await engine.update(case.weights(1))
    return joined(await call)


async def test_what_lives_is_computed_again_and_of_one_version(case: Case) -> None:
    engine = await case.awake()
    got = await over_an_update(case, engine, prompt(40))
    assert set(got.versions) == {0, 1}
    assert got.kv_versions == got.versions
    assert engine.metrics().prefilled_tokens > 2 * 40
    assert engine.metrics().mixed_tokens == 0
    assert (await generate(engine, prompt(40), ONE)).cached_tokens <= 32


async def test_what_lives_goes_on_over_kept_kv_and_says_so(case: Case) -> None:
    engine = await case.awake(on_publish="keep")
    got = await over_an_update(case, engine, prompt(40))
    assert set(got.versions) == {0, 1}
    assert set(got.kv_versions) == {0}
    metrics = engine.metrics()
    assert metrics.prefilled_tokens == 40
    assert metrics.mixed_tokens == got.versions.count(1)
    # Its next call too, as far as it goes over that KV.
    again = await generate(engine, prompt(40) + got.token_ids, ONE)
    assert again.cached_tokens >= 128
    assert (again.versions, again.kv_versions) == ((1,), (0,))


async def test_no_other_session_finds_kept_kv(case: Case) -> None:
    engine, fresh = await case.awake(on_publish="keep"), await case.awake(1)
    got = await over_an_update(case, engine, prompt(40))
    whole = prompt(40) + got.token_ids
    want = await generate(fresh, whole, ONE)
    for session in ("t", "u"):
        other = await generate(engine, whole, ONE, session=session)
        assert (other.versions, other.kv_versions) == ((1,), (1,))
        assert other.logprobs == pytest.approx(want.logprobs, abs=case.tolerance)
        assert other.cached_tokens == (0 if session == "t" else 136)
    # What is as long and of its own weights is better.
    assert (await generate(engine, whole, ONE)).kv_versions == (1,)


async def test_a_session_whose_kept_kv_is_gone_is_of_one_version_again(case: Case) -> None:
    engine = await case.awake(on_publish="keep", kv_tokens=128, window_tokens=128)
    await generate(engine, prompt(40), ONE)
    await engine.update(case.weights(1))
    assert (await generate(engine, prompt(40), ONE)).kv_versions == (0,)
    await generate(engine, prompt(127, seed=1), ONE, session="t")
    got = await generate(engine, prompt(40), ONE)
    assert (got.cached_tokens, got.versions, got.kv_versions) == (0, (1,), (1,))
    assert got.logprobs == pytest.approx(case.logprobs(prompt(40), got.token_ids, seed=1), abs=case.tolerance)


@pytest.mark.parametrize("keep", [False, True])
async def test_kv_that_comes_while_weights_change_is_kept_or_refused(case: Case, keep: bool) -> None:
    first = await case.awake()
    second = await case.awake(on_publish="keep" if keep else "recompute")
    await generate(first, prompt(200), ONE)
    manifest = await first.export_kv("s")
    taking = asyncio.create_task(second.import_kv(manifest))
    await asyncio.sleep(0)
    await second.update(case.weights(1))
    with suppress(KvUnavailable):
        assert await taking == 200
        # It was there before the weights; else they would have been found out.
        assert keep or second.metrics().kv_tokens_imported == 200
    assert not keep or taking.exception() is None
    await first.release_kv(manifest.pin)
    longer = (*prompt(200), 5)
    got = await generate(second, longer, ONE)
    assert got.versions == (1,)
    assert (got.cached_tokens, got.kv_versions) == ((200, (0,)) if keep else (0, (1,)))
    want = await generate(await case.awake(1), longer, ONE)
    other = await generate(second, longer, ONE, session="t")
    assert (other.cached_tokens, other.kv_versions) == (0 if keep else 200, (1,))
    for fresh in (other, *([] if keep else [got])):
        assert fresh.logprobs == pytest.approx(want.logprobs, abs=case.tolerance)
    assert second.metrics().kv_blocks_used == 0


async def test_kept_kv_is_handed_over_as_what_it_is(case: Case) -> None:
    keeping = await case.awake(on_publish="keep")
    await generate(keeping, prompt(200), ONE)
    await keeping.update(case.weights(1))
    manifest = await keeping.export_kv("s")
    assert (manifest.layout.version, manifest.newest) == (0, 1)
    for other in (await case.awake(1), await case.awake(0, on_publish="keep")):
        # One of them keeps nothing, the other's weights are older than some of it.
        with pytest.raises(KvUnavailable, match="version is 0 to 1"):
            await other.import_kv(manifest)
        assert other.metrics().kv_blocks_used == 0
    taking = await case.awake(1, on_publish="keep")
    assert await taking.import_kv(manifest) == 200
    assert await keeping.release_kv(manifest.pin)
    got = await generate(taking, (*prompt(200), 5), ONE)
    assert (got.cached_tokens, got.versions, got.kv_versions) == (200, (1,), (0,))
    other = await generate(taking, (*prompt(200), 5), ONE, session="t")
    assert (other.cached_tokens, other.kv_versions) == (0, (1,))


async def test_several_versions_of_a_session_are_told_apart(case: Case) -> None:
    engine = await case.awake(on_publish="keep")
    branches = [prompt(48, seed=seed) for seed in range(3)]
    for version, ids in enumerate(branches):
        if version:
            await engine.update(case.weights(version))
        await generate(engine, ids, ONE)
    for version, ids in enumerate(branches):
        got = await generate(engine, (*ids, 7), ONE)
        assert (got.cached_tokens, got.versions, got.kv_versions) == (48, (2,), (version,))
