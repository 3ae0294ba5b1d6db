"""KV that one server has computed and another finds, by SGLang's hierarchical cache over a shared folder."""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gyre.cell.engine import Chunk, SamplingParams
from gyre.cell.engine.sglang import SglangEngine
from gyre.cell.engine.sglang_launch import Served
from tests.cell.engine.calls import VOCAB, chunks_of, generate, joined, prompt, request
from tests.cell.engine.conftest import DEVICE, ModelWeights
from tests.sglang.conftest import Pool, SglangCase, sglang_config

MakeCase = Callable[..., SglangCase]

PAGE = 8
SHORT = SamplingParams(temperature=0.0, max_new_tokens=8)
LONG = SamplingParams(temperature=1.0, max_new_tokens=60, ignore_eos=True)
LIMIT_BYTES = 1 << 28
WRITTEN_TIMEOUT_S = 30.0


def kept_pages(shm: Path, version: int) -> int:
    return sum(not path.name.startswith(".") for path in shm.glob(f"sglang-kv/v{version}/*/*"))


async def written(shm: Path, version: int, pages: int) -> None:
    """A server writes when it has answered, and tells nobody when it has."""
    async with asyncio.timeout(WRITTEN_TIMEOUT_S):
        while kept_pages(shm, version) < pages:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def agree(case: SglangCase, ids: tuple[int, ...], got: Chunk, seed: int, temperature: float = 1.0) -> None:
    want = case.logprobs(ids, got.token_ids, temperature, seed=seed)
    assert max(abs(a - b) for a, b in zip(got.logprobs, want, strict=True)) < case.tolerance


async def test_what_one_server_has_computed_another_finds(make_case: MakeCase, shm: Path) -> None:
    case = make_case("llama", own=True, kv_storage_bytes=LIMIT_BYTES)
    here, there = (case.engine(name=name, window_tokens=480) for name in ("here", "there"))
    if DEVICE.type == "cuda":
        # What a server takes of a GPU is told from what is free before and after.
        await here.wake(case.weights(0))
        await there.wake(case.weights(0))
    else:
        await asyncio.gather(here.wake(case.weights(0)), there.wake(case.weights(0)))
    await _a_call_moves(case, here, there, shm)
    await _other_weights_have_other_kv(case, here, there, shm)
    await _what_is_queued_when_weights_change_is_dropped(case, here, there, shm)
    await _it_outlives_a_sleep_and_its_server(case, here, there, shm)


async def _a_call_moves(case: SglangCase, here: SglangEngine, there: SglangEngine, shm: Path) -> None:
    ids = prompt(400)
    first = await generate(here, ids, SHORT)
    assert first.cached_tokens == 0
    await written(shm, 0, 400 // PAGE)
    second = await generate(there, ids, SHORT)
    # All but the page of the last token, which must be computed for its logits.
    assert second.cached_tokens == 392
    assert second.token_ids == first.token_ids
    agree(case, ids, second, 0)


async def _other_weights_have_other_kv(
    case: SglangCase, here: SglangEngine, there: SglangEngine, shm: Path
) -> None:
    """Also where the numbers are the same ones: it is the version that says which KV is right."""
    ids = prompt(400)
    for version, seed in ((1, 1), (2, 1)):
        await there.update(case.weights(seed, version=version))
        assert kept_pages(shm, version) == 0
        got = await generate(there, ids, SHORT)
        assert got.cached_tokens == 0
        agree(case, ids, got, seed)
        await written(shm, version, 400 // PAGE)
    still = await generate(here, ids, SHORT)
    assert set(still.versions) == {0}
    agree(case, ids, still, 0)
    await here.update(case.weights(1, version=2))
    got = await generate(here, ids, SHORT)
    assert got.cached_tokens == 392
    agree(case, ids, got, 1)


@contextmanager
def nothing_moves(fence: Path) -> Iterator[None]:
    """Neither a page nor a version."""
    with fence.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def _rest(call: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in call]


async def _what_is_queued_when_weights_change_is_dropped(
    case: SglangCase, here: SglangEngine, there: SglangEngine, shm: Path
) -> None:
    """In each round calls end whose KV waits to be written, another lives on, and new weights come. All of it
    is kept, under the version that it is of."""
    rounds = range(3, 9)
    known: list[tuple[int, tuple[int, ...]]] = []
    for version in rounds:
        asked = [prompt(100, 10 * version + i) for i in range(4)]
        calls = [here.generate(request(ids, LONG, call=f"c{i}")) for i, ids in enumerate(asked)]
        # From its first token on a call does not wait for what is kept.
        first = await asyncio.gather(*(anext(call) for call in calls))
        with nothing_moves(shm / "here" / "kv-version"):
            rest = await asyncio.gather(*(_rest(call) for call in calls))
            live = asyncio.create_task(chunks_of(here, request(prompt(40), LONG, call="live")))
            await asyncio.sleep(0)
            updating = asyncio.create_task(here.update(case.weights(version % 2, version=version)))
            await asyncio.sleep(0.05 * (version % 3))
        await updating
        assert set(joined(await live).versions) <= {version - 1, version}
        ended = [joined([chunk, *chunks]) for chunk, chunks in zip(first, rest, strict=True)]
        known += [(version - 1, (*ids, *got.token_ids)) for ids, got in zip(asked, ended, strict=True)]
        # The same tokens once more, now of other weights.
        for _, ids in known[-4:]:
            agree(case, ids, await generate(here, ids, SHORT), version % 2)
    for version in rounds:
        await there.update(case.weights(version % 2, version=version))
        for ended_under, ids in known:
            got = await generate(there, ids, SHORT)
            agree(case, ids, got, version % 2)
            if ended_under == version:
                assert got.cached_tokens == 152


async def _it_outlives_a_sleep_and_its_server(
    case: SglangCase, here: SglangEngine, there: SglangEngine, shm: Path
) -> None:
    ids = prompt(300, 99)
    await here.update(case.weights(0, version=20))
    await generate(here, ids, SHORT)
    await written(shm, 20, 300 // PAGE)
    await here.close()
    await there.sleep()
    await there.wake(case.weights(0, version=20))
    got = await generate(there, ids, SHORT)
    assert got.cached_tokens == 296
    agree(case, ids, got, 0)


def larger_model() -> LlamaForCausalLM:
    """So large that to compute a prompt takes a while."""
    torch.manual_seed(0)
    gpu = DEVICE.type == "cuda"
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=2048 if gpu else 576,
        intermediate_size=6144 if gpu else 1536,
        num_hidden_layers=28 if gpu else 12,
        num_attention_heads=16 if gpu else 9,
        num_key_value_heads=8 if gpu else 3,
        max_position_embeddings=32768 if gpu else 4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with DEVICE:
        return LlamaForCausalLM(config).to(torch.bfloat16 if gpu else torch.float32).eval()


async def test_what_moving_costs_beside_computing(make_case: MakeCase, pool: Pool, shm: Path) -> None:
    """A prompt is computed, and loaded once more after the server has dropped all of its own."""
    model = larger_model()
    folder = pool.folder("larger")
    model.config.save_pretrained(folder)
    lengths = (2048, 8192, 16384) if DEVICE.type == "cuda" else (256, 1024)
    served = Served(
        model_folder=folder,
        dtype="bfloat16" if DEVICE.type == "cuda" else "float32",
        window_tokens=lengths[-1] + 64,
        kv_tokens=2 * lengths[-1],
        block_tokens=16,
        max_batch=4,
        device=DEVICE.type,
    )
    config = sglang_config(
        kv_storage_bytes=1 << 34,
        mem_fraction_static=0.15 if DEVICE.type == "cuda" else 0.5,
    )
    engine = SglangEngine(
        served,
        config,
        chunk_interval_s=0.0,
        eos_token_ids=(),
        vocab=VOCAB,
        log_path=shm / "server.log",
        scratch=shm / "sglang",
    )
    weights = ModelWeights(0, model, bool)
    try:
        await engine.wake(weights)
        # Kernels are compiled in the first calls.
        await generate(engine, prompt(lengths[0], 99), SHORT)
        await generate(engine, prompt(lengths[0], 98), SHORT)
        known = 2 * (lengths[0] // 16)
        for length in lengths:
            computed_s, moved_s = [], []
            for turn in range(2):
                ids = prompt(length, 1000 * turn + length)
                began_s = time.monotonic()
                first = await generate(engine, ids, SamplingParams(temperature=0.0, max_new_tokens=1))
                computed_s.append(time.monotonic() - began_s)
                assert first.cached_tokens == 0
                known += length // 16
                await written(shm, 0, known)
                await engine.update(weights)
                began_s = time.monotonic()
                again = await generate(engine, ids, SamplingParams(temperature=0.0, max_new_tokens=1))
                moved_s.append(time.monotonic() - began_s)
                assert again.cached_tokens == length - 16
                assert abs(again.logprobs[0] - first.logprobs[0]) < 0.05
            print(
                f"{length} tokens: computed in {min(computed_s) * 1000:.0f} ms, "
                f"moved in {min(moved_s) * 1000:.0f} ms"
            )
    finally:
        await engine.close()
