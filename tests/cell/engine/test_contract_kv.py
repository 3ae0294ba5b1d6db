"""What every engine promises about handing KV over: `export_kv` and `import_kv`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.cell.engine import (
    Engine,
    EngineAsleep,
    KvManifest,
    KvPart,
    KvUnavailable,
    SamplingParams,
    pack_ids,
    unpack_ids,
)
from gyre.cell.engine.base import SUM_BYTES, head_bytes
from gyre.rdma import RegionError, RegionHandle
from tests.cell.engine.calls import VOCAB, chunks_of, generate, joined, prompt, request, until
from tests.cell.engine.conftest import Case

pytestmark = pytest.mark.needs("kv")

replace = msgspec.structs.replace


@asynccontextmanager
async def exported(engine: Engine, session: str = "s") -> AsyncIterator[KvManifest]:
    manifest = await engine.export_kv(session)
    pinned = engine.metrics().kv_blocks_pinned
    assert pinned >= len(manifest.blocks) > 0
    yield manifest
    assert await engine.release_kv(manifest.pin)
    assert engine.metrics().kv_blocks_pinned == pinned - len(manifest.blocks)


async def test_another_engine_goes_on_with_the_same_tokens_and_numbers(case: Case) -> None:
    sampling = SamplingParams(seed=3, temperature=1.1, max_new_tokens=30)
    first, second = await case.awake(), await case.awake()
    turn = prompt(40)
    answer = await generate(first, turn, SamplingParams(max_new_tokens=17))
    longer = turn + answer.token_ids + prompt(5, seed=1)
    async with exported(first) as manifest:
        # 40 + 16 tokens have KV: the last one sampled has none.
        assert unpack_ids(manifest.tokens) == (turn + answer.token_ids)[:56]
        assert await second.import_kv(manifest) == 56
    got = await generate(second, longer, sampling)
    want = await generate(first, longer, sampling)
    assert got.cached_tokens == want.cached_tokens == 56
    assert got.token_ids == want.token_ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-6)
    assert second.metrics().prefilled_tokens == len(longer) - 56
    assert second.metrics().kv_tokens_imported == 56
    assert (first.metrics().kv_blocks_used, second.metrics().kv_blocks_used) == (0, 0)


async def test_a_call_that_runs_can_be_exported_and_goes_on(case: Case) -> None:
    sampling = SamplingParams(seed=2, max_new_tokens=100)
    first, second = await case.awake(), await case.awake()
    call = asyncio.create_task(chunks_of(first, request(prompt(20), sampling)))
    await until(first, lambda metrics: metrics.generated_tokens >= 30)
    async with exported(first) as manifest:
        taken = await second.import_kv(manifest)
    assert taken == manifest.length_tokens >= 40
    whole = prompt(20) + joined(await call).token_ids
    assert unpack_ids(manifest.tokens) == whole[:taken]
    cut = taken + 3
    rest = await generate(second, whole[:cut], sampling, prompt_tokens=20)
    assert rest.cached_tokens == taken
    assert rest.token_ids == whole[cut:]


async def test_a_call_that_was_aborted_can_be_exported(case: Case) -> None:
    engine = await case.awake()
    call = asyncio.create_task(chunks_of(engine, request(prompt(20), SamplingParams(max_new_tokens=200))))
    await until(engine, lambda metrics: metrics.generated_tokens >= 10)
    await engine.abort_all()
    out = joined(await call).token_ids
    async with exported(engine) as manifest:
        assert unpack_ids(manifest.tokens) == (prompt(20) + out)[: (20 + len(out) - 1) // 8 * 8]


async def test_the_last_call_of_each_session_is_exported(case: Case) -> None:
    engine = await case.awake()
    for session, length in (("a", 20), ("b", 30), ("a", 50)):
        await generate(engine, prompt(length, seed=length), SamplingParams(max_new_tokens=1), session=session)
    async with exported(engine, "a") as a, exported(engine, "b") as b:
        assert (a.session, unpack_ids(a.tokens)) == ("a", prompt(50, seed=50)[:48])
        assert (b.session, unpack_ids(b.tokens)) == ("b", prompt(30, seed=30)[:24])


async def test_kv_can_be_handed_over_while_both_are_paused(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(40))
    await first.pause()
    await second.pause()
    async with exported(first) as manifest:
        assert await second.import_kv(manifest) == 56
    await second.resume()
    assert (await generate(second, prompt(40))).cached_tokens == 32


async def test_what_is_there_already_is_kept_and_shared(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(64))
    await generate(second, prompt(64)[:20], SamplingParams(max_new_tokens=1))
    async with exported(first) as manifest:
        assert await second.import_kv(manifest) == 80
        assert await second.import_kv(manifest) == 80
        assert await first.import_kv(manifest) == 80
    got, want = await generate(second, prompt(64)), await generate(first, prompt(64))
    assert got.cached_tokens == 56
    assert (got.token_ids, got.logprobs) == (want.token_ids, pytest.approx(want.logprobs, abs=1e-6))


async def test_what_does_not_fit_stays_out_and_running_calls_keep_theirs(case: Case) -> None:
    first = await case.awake()
    await generate(first, prompt(100), SamplingParams(max_new_tokens=1))
    # 16 blocks, of which the call below holds 6 to 8 when the import comes.
    second = await case.awake(kv_tokens=128, window_tokens=128)
    sampling = SamplingParams(seed=1, max_new_tokens=60)
    call = asyncio.create_task(chunks_of(second, request(prompt(4, seed=4), sampling)))
    await until(second, lambda metrics: metrics.generated_tokens >= 40)
    await second.pause()
    async with exported(first) as manifest:
        assert manifest.length_tokens == 96
        taken = await second.import_kv(manifest)
        assert 64 <= taken <= 80
    await second.resume()
    assert joined(await call).token_ids == (
        (await generate(await case.awake(), prompt(4, seed=4), sampling)).token_ids
    )


async def test_an_engine_without_a_free_block_imports_nothing(case: Case) -> None:
    first = await case.awake()
    await generate(first, prompt(20))
    second = await case.awake(kv_tokens=64)
    call = asyncio.create_task(chunks_of(second, request(prompt(57, seed=1), SamplingParams())))
    await until(second, lambda metrics: metrics.running == 1)
    await second.pause()
    async with exported(first) as manifest:
        with pytest.raises(KvUnavailable, match="no room"):
            await second.import_kv(manifest)
    await second.resume()
    assert len(joined(await call).token_ids) == 7


@pytest.mark.needs("open kv")
async def test_parts_of_two_ranks_go_into_one(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(40))
    async with exported(first) as manifest:
        halves = split_heads(case, manifest)
        with pytest.raises(KvUnavailable, match="heads"):
            await second.import_kv(replace(halves, parts=halves.parts[:1]))
        # In any order.
        assert await second.import_kv(replace(halves, parts=halves.parts[::-1])) == 56
    want, got = await generate(first, prompt(40)), await generate(second, prompt(40))
    assert got.cached_tokens == 32
    assert (got.token_ids, got.logprobs) == (want.token_ids, pytest.approx(want.logprobs, abs=1e-6))


def split_heads(case: Case, manifest: KvManifest) -> KvManifest:
    """The same KV as two ranks with half of the heads each have it."""
    layout = manifest.layout
    rows = layout.layers * 2 * layout.block_tokens
    line = head_bytes(layout) // rows
    held: list[Any] = []
    for part in manifest.parts:
        with case.regions.open(part.region) as source:
            heads = part.heads[1] - part.heads[0]
            held.append(np.frombuffer(bytes(source.buffer), np.uint8).reshape(-1, heads, line))
    whole = np.concatenate(held, axis=1)
    parts = []
    for rank, heads in enumerate(((0, 1), (1, layout.kv_heads))):
        piece = whole[:, heads[0] : heads[1]].tobytes()
        words = np.frombuffer(piece, np.int64).reshape(len(whole) // rows, -1)[list(manifest.blocks)]
        with case.regions.allocate(f"half-{rank}", len(piece)) as region:
            region.buffer[:] = piece
            parts.append(KvPart(heads=heads, region=region.handle, sums=words.sum(1).tobytes()))
    return replace(manifest, parts=tuple(parts))


@pytest.mark.needs("open kv")
@pytest.mark.parametrize("heads", ["as they are", "split"])
async def test_a_block_that_is_not_what_was_pinned_is_not_taken_over(case: Case, heads: str) -> None:
    """One bit of it is another, and all numbers are finite."""
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(40))
    async with exported(first) as manifest:
        broken = split_heads(case, manifest) if heads == "split" else manifest
        part = broken.parts[-1]
        nbytes = head_bytes(manifest.layout) * (part.heads[1] - part.heads[0])
        corrupt(case, part.region, manifest.blocks[5] * nbytes + nbytes // 2)
        with pytest.raises(KvUnavailable, match=rf"blocks \[{manifest.blocks[5]}\]"):
            await second.import_kv(broken)
        assert second.metrics().kv_blocks_used == 0
        # What is not asked for does not matter.
        few = replace(
            broken,
            tokens=broken.tokens[: 4 * 40],
            blocks=broken.blocks[:5],
            parts=tuple(replace(p, sums=p.sums[: 5 * SUM_BYTES]) for p in broken.parts),
        )
        assert await second.import_kv(few) == 40


def corrupt(case: Case, region: RegionHandle, at: int) -> None:
    held = case.regions.attach(region, writable=True)
    with held.view() as memory:
        memory[at] ^= 1
    held.close()


# --- pins ---------------------------------------------------------------------------------------


async def test_what_is_pinned_stays_until_it_is_released(case: Case) -> None:
    first, second = await case.awake(kv_tokens=128, window_tokens=128), await case.awake()
    want = await generate(first, prompt(40), SamplingParams(max_new_tokens=1))
    async with exported(first) as manifest:
        # All that is not pinned is used again, and again.
        for n in range(4):
            await generate(first, prompt(60, seed=n), SamplingParams(max_new_tokens=1), session="t")
        assert await second.import_kv(manifest) == 40
    got = await generate(second, prompt(40), SamplingParams(max_new_tokens=1))
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-6)
    await generate(first, prompt(120, seed=9), SamplingParams(max_new_tokens=1))
    assert first.metrics().kv_blocks_used == 0


async def test_what_is_not_pinned_any_more_is_not_taken_over(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(40))
    manifest = await first.export_kv("s")
    assert await first.release_kv(manifest.pin)
    assert not await first.release_kv(manifest.pin)
    with pytest.raises(RegionError):
        await second.import_kv(manifest)
    assert second.metrics().kv_imports_refused == 1
    assert second.metrics().kv_blocks_used == 0
    assert (await generate(second, prompt(40))).cached_tokens == 0


async def test_a_pin_ends_by_itself(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(40))
    manifest = await first.export_kv("s", lease_s=0.02)
    async with asyncio.timeout(5.0):
        await until(first, lambda metrics: metrics.kv_blocks_pinned == 0)
    with pytest.raises((RegionError, KvUnavailable)):
        await second.import_kv(manifest)
    assert not await first.release_kv(manifest.pin)


async def test_weights_that_change_while_kv_is_read_keep_it_out(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(200), SamplingParams(max_new_tokens=1))
    async with exported(first) as manifest:
        taking = asyncio.create_task(second.import_kv(manifest))
        await asyncio.sleep(0)
        await second.update(case.weights(1))
        with suppress(KvUnavailable):
            await taking
    got = await generate(second, prompt(200), SamplingParams(max_new_tokens=1))
    want = await generate(await case.awake(1), prompt(200), SamplingParams(max_new_tokens=1))
    assert got.cached_tokens == 0
    assert got.logprobs == pytest.approx(want.logprobs, abs=case.tolerance)
    assert second.metrics().kv_blocks_used == 0


@pytest.mark.parametrize("end", ["sleep", "cancel"])
async def test_an_import_that_is_cut_off_leaves_nothing_reserved(case: Case, end: str) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(200), SamplingParams(max_new_tokens=1))
    async with exported(first) as manifest:
        taking = asyncio.create_task(second.import_kv(manifest))
        await asyncio.sleep(0)
        if end == "sleep":
            await second.sleep()
            with pytest.raises(EngineAsleep):
                await taking
            await second.wake(case.weights(0))
        else:
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            await until(second, lambda metrics: metrics.kv_imports_refused == 1)
        assert second.metrics().kv_blocks_used == 0
        assert await second.import_kv(manifest) == 200


async def test_kv_of_another_version_is_refused(case: Case) -> None:
    first, second = await case.awake(0), await case.awake(1)
    await generate(first, prompt(40))
    async with exported(first) as manifest:
        with pytest.raises(KvUnavailable, match="version"):
            await second.import_kv(manifest)
        await first.update(case.weights(1))
        with pytest.raises(KvUnavailable, match="version"):
            await first.import_kv(manifest)
    with pytest.raises(KvUnavailable, match="session s"):
        await first.export_kv("s")


async def test_what_is_not_there_is_not_exported(case: Case) -> None:
    engine = await case.awake()
    with pytest.raises(KvUnavailable, match="session nobody"):
        await engine.export_kv("nobody")
    await generate(engine, prompt(3), SamplingParams(max_new_tokens=2))
    with pytest.raises(KvUnavailable, match="session s"):
        await engine.export_kv("s")


async def test_an_engine_that_sleeps_has_no_kv(case: Case) -> None:
    engine = await case.awake()
    await generate(engine, prompt(40))
    manifest = await engine.export_kv("s")
    if True:
        await engine.sleep()
        with pytest.raises(EngineAsleep):
            await engine.export_kv("s")
        with pytest.raises(EngineAsleep):
            await engine.import_kv(manifest)
        await engine.wake(case.weights(0))
        with pytest.raises(KvUnavailable):
            await engine.export_kv("s")
        # Its memory is another now, and nobody would say that this is what it was.
        with pytest.raises((RegionError, KvUnavailable)):
            await engine.import_kv(manifest)


_INTEGERS = st.integers(-(2**70), 2**70) | st.integers(-1, 9)
_IDS = st.integers(-1, VOCAB) | st.integers(-(2**31), 2**31 - 1)
_TOKENS = st.lists(_IDS, max_size=70).map(pack_ids) | st.binary(max_size=70)
_HANDLES = st.builds(
    RegionHandle,
    backend=st.sampled_from(["shm", "tcp", ""]),
    name=st.sampled_from(["whole", "small", "gone", "../x", "", "\0"]),
    nbytes=_INTEGERS | st.just(64),
)


_SUMS = st.binary(max_size=9 * SUM_BYTES)


@st.composite
def mutations(draw: Any) -> dict[str, Any]:
    """What to replace in a manifest; of `parts` a function of the parts."""
    layout = draw(
        st.dictionaries(
            st.sampled_from(["version", "layers", "block_tokens", "kv_heads", "head_dim"]), _INTEGERS
        )
        | st.dictionaries(st.sampled_from(["model", "adapter", "dtype"]), st.text(max_size=9))
        | st.just({})
    )
    blocks = st.none() | st.lists(_INTEGERS, max_size=9).map(tuple) | st.just((0,) * 6 + (4096,))
    parts = st.lists(
        st.builds(KvPart, heads=st.tuples(_INTEGERS, _INTEGERS), region=_HANDLES, sums=_SUMS), max_size=3
    ).map(tuple)
    return {
        "layout": layout,
        "tokens": draw(st.none() | _TOKENS | st.integers(0, 56)),
        "newest": draw(st.none() | _INTEGERS),
        "blocks": draw(blocks),
        "proof": draw(st.none() | _HANDLES),
        "lease_s": draw(st.none() | st.sampled_from([0.0, -1.0, float("nan"), float("inf")])),
        "parts": draw(st.none() | parts),
        "heads": draw(st.none() | st.tuples(_INTEGERS, _INTEGERS)),
        "sums": draw(st.none() | _SUMS | st.binary(min_size=7 * SUM_BYTES, max_size=7 * SUM_BYTES)),
    }


def mutated(manifest: KvManifest, what: dict[str, Any]) -> KvManifest:
    tokens, parts = what["tokens"], what["parts"]
    if isinstance(tokens, int):
        tokens = manifest.tokens[: 4 * tokens]
    if parts is None:
        parts = manifest.parts
        for name in ("heads", "sums"):
            if what[name] is not None:
                parts = tuple(replace(part, **{name: what[name]}) for part in parts)
    plain = {name: what[name] for name in ("newest", "blocks", "proof", "lease_s") if what[name] is not None}
    return replace(
        manifest,
        **plain,
        layout=replace(manifest.layout, **what["layout"]),
        tokens=manifest.tokens if tokens is None else tokens,
        parts=parts,
    )


async def test_a_broken_manifest_is_refused_and_harms_nobody(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    want = await generate(first, prompt(40))
    manifest = await first.export_kv("s")
    with case.regions.allocate("small", 64):
        pass
    loop = asyncio.get_running_loop()

    async def attempt(broken: KvManifest) -> None:
        if broken == manifest:
            return
        with pytest.raises((KvUnavailable, RegionError)):
            await second.import_kv(broken)
        assert second.metrics().kv_blocks_used == 0

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(mutations())
    def attempts(what: dict[str, Any]) -> None:
        asyncio.run_coroutine_threadsafe(attempt(mutated(manifest, what)), loop).result(30.0)

    await asyncio.to_thread(attempts)
    got = await generate(second, prompt(40))
    assert (got.token_ids, got.cached_tokens) == (want.token_ids, 0)
    assert await second.import_kv(manifest) == 56
    assert await first.release_kv(manifest.pin)
