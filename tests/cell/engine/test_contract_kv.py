"""What every engine promises about handing KV over: `export_kv` and `import_kv`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
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
)
from gyre.rdma import RegionError, RegionHandle
from tests.cell.engine.calls import VOCAB, chunks_of, generate, joined, prompt, request, until
from tests.cell.engine.conftest import Case

pytestmark = pytest.mark.needs("kv")

replace = msgspec.structs.replace


def free(case: Case, manifest: KvManifest) -> None:
    for part in manifest.parts:
        case.regions.free(part.region)


@asynccontextmanager
async def exported(case: Case, engine: Engine, session: str = "s") -> AsyncIterator[KvManifest]:
    manifest = await engine.export_kv(session)
    try:
        yield manifest
    finally:
        free(case, manifest)


async def test_another_engine_goes_on_with_the_same_tokens_and_numbers(case: Case) -> None:
    sampling = SamplingParams(seed=3, temperature=1.1, max_new_tokens=30)
    first, second = await case.awake(), await case.awake()
    turn = prompt(40)
    answer = await generate(first, turn, SamplingParams(max_new_tokens=17))
    longer = turn + answer.token_ids + prompt(5, seed=1)
    async with exported(case, first) as manifest:
        # 40 + 16 tokens have KV: the last one sampled has none.
        assert manifest.tokens == (turn + answer.token_ids)[:56]
        assert await second.import_kv(manifest) == 56
    got = await generate(second, longer, sampling)
    want = await generate(first, longer, sampling)
    assert got.cached_tokens == want.cached_tokens == 56
    assert got.token_ids == want.token_ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-6)
    assert second.metrics().prefilled_tokens == len(longer) - 56
    assert (first.metrics().kv_blocks_used, second.metrics().kv_blocks_used) == (0, 0)


async def test_a_call_that_runs_can_be_exported_and_goes_on(case: Case) -> None:
    sampling = SamplingParams(seed=2, max_new_tokens=100)
    first, second = await case.awake(), await case.awake()
    call = asyncio.create_task(chunks_of(first, request(prompt(20), sampling)))
    await until(first, lambda metrics: metrics.generated_tokens >= 30)
    async with exported(case, first) as manifest:
        taken = await second.import_kv(manifest)
    assert taken == len(manifest.tokens) >= 40
    whole = prompt(20) + joined(await call).token_ids
    assert manifest.tokens == whole[:taken]
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
    async with exported(case, engine) as manifest:
        assert manifest.tokens == (prompt(20) + out)[: (20 + len(out) - 1) // 8 * 8]


async def test_the_last_call_of_each_session_is_exported(case: Case) -> None:
    engine = await case.awake()
    for session, length in (("a", 20), ("b", 30), ("a", 50)):
        await generate(engine, prompt(length, seed=length), SamplingParams(max_new_tokens=1), session=session)
    async with exported(case, engine, "a") as a, exported(case, engine, "b") as b:
        assert (a.session, a.tokens) == ("a", prompt(50, seed=50)[:48])
        assert (b.session, b.tokens) == ("b", prompt(30, seed=30)[:24])


async def test_kv_can_be_handed_over_while_both_are_paused(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(40))
    await first.pause()
    await second.pause()
    async with exported(case, first) as manifest:
        assert await second.import_kv(manifest) == 56
    await second.resume()
    assert (await generate(second, prompt(40))).cached_tokens == 32


async def test_what_is_there_already_is_kept_and_shared(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(64))
    await generate(second, prompt(64)[:20], SamplingParams(max_new_tokens=1))
    async with exported(case, first) as manifest:
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
    async with exported(case, first) as manifest:
        assert len(manifest.tokens) == 96
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
    async with exported(case, first) as manifest:
        with pytest.raises(KvUnavailable, match="no room"):
            await second.import_kv(manifest)
    await second.resume()
    assert len(joined(await call).token_ids) == 7


async def test_parts_of_two_ranks_go_into_one(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(40))
    async with exported(case, first) as manifest:
        halves = split_heads(case, manifest)
    with pytest.raises(KvUnavailable, match="heads"):
        await second.import_kv(replace(halves, parts=halves.parts[:1]))
    # In any order.
    assert await second.import_kv(replace(halves, parts=halves.parts[::-1])) == 56
    free(case, halves)
    want, got = await generate(first, prompt(40)), await generate(second, prompt(40))
    assert got.cached_tokens == 32
    assert (got.token_ids, got.logprobs) == (want.token_ids, pytest.approx(want.logprobs, abs=1e-6))


def _lines(data: bytes, count: int) -> list[bytes]:
    length = len(data) // count
    return [data[at : at + length] for at in range(0, len(data), length)]


def split_heads(case: Case, manifest: KvManifest) -> KvManifest:
    """The same KV as two ranks with half of the heads each export it."""
    layout = manifest.layout
    rows = len(manifest.tokens) * layout.layers * 2
    held: list[bytes] = []
    for part in manifest.parts:
        with case.regions.open(part.region) as source:
            held.append(bytes(source.buffer))
    lines = [b"".join(line) for line in zip(*(_lines(data, rows) for data in held), strict=True)]
    head = len(lines[0]) // layout.kv_heads
    parts = []
    for rank, heads in enumerate(((0, 1), (1, layout.kv_heads))):
        piece = b"".join(line[heads[0] * head : heads[1] * head] for line in lines)
        with case.regions.allocate(f"half-{rank}", len(piece)) as region:
            region.buffer[:] = piece
            parts.append(KvPart(heads=heads, region=region.handle))
    return replace(manifest, parts=tuple(parts))


async def test_kv_of_another_version_is_refused(case: Case) -> None:
    first, second = await case.awake(0), await case.awake(1)
    await generate(first, prompt(40))
    async with exported(case, first) as manifest:
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
    async with exported(case, engine) as manifest:
        await engine.sleep()
        with pytest.raises(EngineAsleep):
            await engine.export_kv("s")
        with pytest.raises(EngineAsleep):
            await engine.import_kv(manifest)
        await engine.wake(case.weights(0))
        with pytest.raises(KvUnavailable):
            await engine.export_kv("s")
        assert await engine.import_kv(manifest) == 56


async def test_regions_that_are_gone_are_told_and_change_nothing(case: Case) -> None:
    first, second = await case.awake(), await case.awake()
    await generate(first, prompt(40))
    async with exported(case, first) as manifest:
        pass
    with pytest.raises(RegionError, match="gone"):
        await second.import_kv(manifest)
    assert (await generate(second, prompt(40))).cached_tokens == 0


_INTEGERS = st.integers(-(2**70), 2**70) | st.integers(-1, 9)
_TOKENS = st.lists(st.integers(-1, VOCAB) | _INTEGERS, max_size=70).map(tuple)
_HANDLES = st.builds(
    RegionHandle,
    backend=st.sampled_from(["shm", "tcp", ""]),
    name=st.sampled_from(["whole", "small", "gone", "../x", "", "\0"]),
    nbytes=_INTEGERS | st.just(64),
)


@st.composite
def mutations(draw: Any) -> dict[str, Any]:
    """What to replace in a manifest; of `parts` a function of the parts."""
    layout = draw(
        st.dictionaries(st.sampled_from(["layers", "block_tokens", "kv_heads", "head_dim"]), _INTEGERS)
        | st.dictionaries(st.sampled_from(["model", "adapter", "dtype"]), st.text(max_size=9))
        | st.just({})
    )
    parts = st.lists(
        st.builds(KvPart, heads=st.tuples(_INTEGERS, _INTEGERS), region=_HANDLES), max_size=3
    ).map(tuple)
    return {
        "layout": layout,
        "tokens": draw(st.none() | _TOKENS | st.integers(0, 56)),
        "parts": draw(st.none() | parts),
        "heads": draw(st.none() | st.tuples(_INTEGERS, _INTEGERS)),
    }


def mutated(manifest: KvManifest, what: dict[str, Any]) -> KvManifest:
    tokens, parts = what["tokens"], what["parts"]
    if isinstance(tokens, int):
        tokens = manifest.tokens[:tokens]
    if parts is None:
        parts = manifest.parts
        if what["heads"] is not None:
            parts = tuple(replace(part, heads=what["heads"]) for part in parts)
    return replace(
        manifest,
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
    free(case, manifest)
