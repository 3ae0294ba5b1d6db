"""What only the native engine promises: one thread, memory, models, the module shared with a trainer."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from gyre.cell.engine import EngineFault, GenerateRequest, KvUnavailable, SamplingParams
from gyre.cell.engine.memory import is_released, restore_parameters
from gyre.cell.engine.native import NativeEngine
from tests.cell.engine import calls
from tests.cell.engine.calls import prompt
from tests.cell.engine.conftest import DEVICE, ModelWeights, NativeCase

OPTIONS: dict[str, Any] = {
    "window_tokens": 256,
    "kv_tokens": 4096,
    "block_tokens": 8,
    "max_batch": 16,
    "chunk_interval_s": 0.0,
    "eos_token_ids": (),
}


async def generate(engine: NativeEngine, call: str = "c", new_tokens: int = 10) -> tuple[int, ...]:
    request = GenerateRequest(
        call=call,
        session="s",
        prompt_ids=(1, 2, 3),
        prompt_tokens=3,
        sampling=SamplingParams(max_new_tokens=new_tokens),
    )
    return tuple([token async for chunk in engine.generate(request) for token in chunk.token_ids])


async def test_sleep_frees_weights_and_kv_and_keeps_the_module(native: Any) -> None:
    engine = await native.awake()
    model = native.models[0]
    tokens = await generate(engine)
    parameters = list(model.parameters())
    await engine.sleep()
    assert all(is_released(p) for p in parameters)
    assert engine._rollout._runner.kv_bytes == 0
    await engine.wake(native.weights(0, version=1))
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert await generate(engine) == tokens


async def test_construction_leaves_the_weights_alone(native: Any) -> None:
    engine = native.engine()
    await engine.sleep()
    assert not any(is_released(p) for p in native.models[0].parameters())


async def test_the_pool_is_block_major(native: Any) -> None:
    engine = await native.awake(kv_tokens=64)
    data = engine._rollout._runner._kv.data
    # 8 blocks and the one that pads; 2 layers, keys and values, 8 tokens, 2 heads of 16.
    assert data.shape == (9, 2, 2, 8, 2, 16)
    assert data.is_contiguous()
    await asyncio.gather(*(generate(engine, f"c{i}", new_tokens=9 + i) for i in range(4)))
    assert data[:8].abs().sum() > 0
    assert not data[8].any()


async def test_a_trainer_uses_the_same_module_while_the_engine_sleeps(native: Any) -> None:
    thread = ThreadPoolExecutor(1)
    engine = await native.awake(device_thread=thread)
    model = native.models[0]
    tokens = await generate(engine)
    await engine.sleep()

    def train() -> tuple[str, float]:
        restore_parameters(model)
        model.load_state_dict(native.reference(0).state_dict())
        model.train()
        ids = torch.tensor([[1, 2, 3, 4]], device=model.device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = float(model.get_input_embeddings().weight.grad.norm())
        model.zero_grad(set_to_none=True)
        return model.config._attn_implementation, norm

    attention, norm = thread.submit(train).result()
    assert attention == "sdpa"
    assert norm > 0
    await engine.sleep()
    assert not any(is_released(p) for p in model.parameters())
    await engine.wake(native.weights(0, version=1))
    assert await generate(engine) == tokens
    await engine.close()
    assert thread.submit(lambda: 1).result() == 1
    thread.shutdown()


async def test_all_torch_work_is_on_the_device_thread(native: Any) -> None:
    threads: set[str] = set()

    def note(*_: Any) -> None:
        threads.add(threading.current_thread().name)

    thread = ThreadPoolExecutor(1, thread_name_prefix="device")
    engine = native.engine(device_thread=thread)
    decoder = engine._rollout._runner._decoder
    linear = decoder._linear

    def noted(*arguments: Any) -> torch.Tensor:
        note()
        return linear(*arguments)

    decoder._linear = noted
    await engine.wake(native.weights(0, before=note))
    await generate(engine)
    assert threads == {"device_0"}
    await engine.close()
    thread.shutdown()


async def test_a_failed_pass_fails_its_calls_and_no_later_one(native: Any) -> None:
    engine = await native.awake()
    decoder = engine._rollout._runner._decoder
    linear, decoder._linear = decoder._linear, lambda *_: 1 / 0
    results = await asyncio.gather(*(generate(engine, f"c{i}") for i in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [EngineFault] * 3
    assert engine.metrics().kv_blocks_used == 0
    decoder._linear = linear
    assert len(await generate(engine)) == 10


async def test_logits_that_are_not_finite_fail_the_call(native: Any) -> None:
    engine = await native.awake()
    broken = copy.deepcopy(native.reference())
    broken.lm_head.weight.data.fill_(float("nan"))
    await engine.update(ModelWeights(1, broken, bool))
    with pytest.raises(EngineFault, match="not finite under version 1"):
        await generate(engine)
    await engine.update(native.weights(0, version=2))
    assert len(await generate(engine)) == 10


async def test_kv_that_is_not_finite_is_given_to_nobody_and_spoils_no_block(native: Any) -> None:
    first, second = await native.awake(), await native.awake(kv_tokens=64)
    await generate(first, new_tokens=30)
    manifest = await first.export_kv("s")
    first._rollout._runner.kv.data[manifest.blocks[-1], 1, 1, 7, 1, 15] = float("nan")
    with pytest.raises(KvUnavailable, match="other bytes"):
        await second.import_kv(manifest)
    assert len(await generate(second, new_tokens=60)) == 60
    with pytest.raises(KvUnavailable, match="not finite"):
        await first.export_kv("s")


async def test_an_export_that_nobody_waits_for_pins_nothing(native: Any, shm: Path) -> None:
    thread = ThreadPoolExecutor(1)
    engine = await native.awake(device_thread=thread)
    await generate(engine, new_tokens=30)
    files = os.listdir(shm)
    go = threading.Event()
    thread.submit(go.wait, 30.0)
    export = asyncio.create_task(engine.export_kv("s"))
    await asyncio.sleep(0)
    export.cancel()
    with pytest.raises(asyncio.CancelledError):
        await export
    go.set()
    await engine.abort("nobody")
    assert engine.metrics().kv_blocks_pinned == 0
    assert os.listdir(shm) == files
    await engine.close()
    thread.shutdown()


async def test_a_release_that_nobody_waits_for_unpins_all_the_same(native: Any) -> None:
    thread = ThreadPoolExecutor(1)
    engine = await native.awake(device_thread=thread)
    await generate(engine, new_tokens=30)
    manifest = await engine.export_kv("s")
    go = threading.Event()
    thread.submit(go.wait, 30.0)
    disprove, disproved = engine._moves.disprove, asyncio.Event()

    async def disprove_and_tell(pin: str) -> bool:
        held = await disprove(pin)
        disproved.set()
        return bool(held)

    engine._moves.disprove = disprove_and_tell
    release = asyncio.create_task(engine.release_kv(manifest.pin))
    await disproved.wait()
    await given_up(release, go)
    await engine.abort("nobody")
    assert engine.metrics().kv_blocks_pinned == 0
    await engine.close()
    thread.shutdown()


async def test_a_refused_import_that_nobody_waits_for_leaves_nothing_reserved(native: Any) -> None:
    thread = ThreadPoolExecutor(1)
    first, second = await native.awake(), await native.awake(device_thread=thread)
    await generate(first, new_tokens=30)
    manifest = await first.export_kv("s")
    await first.release_kv(manifest.pin)
    go = threading.Event()
    fetch, busy = second._moves.fetch, asyncio.Event()

    async def fetch_and_be_busy(*arguments: Any) -> Any:
        try:
            return await fetch(*arguments)
        finally:
            thread.submit(go.wait, 30.0)
            busy.set()

    second._moves.fetch = fetch_and_be_busy
    taking = asyncio.create_task(second.import_kv(manifest))
    await busy.wait()
    await given_up(taking, go)
    await second.abort("nobody")
    assert second.metrics().kv_imports_refused == 1
    assert second.metrics().kv_blocks_used == 0
    await second.close()
    thread.shutdown()


async def given_up(task: asyncio.Task[Any], go: threading.Event) -> None:
    """Cancelled while it waits for a busy thread."""
    # Until it waits, and until all that is under it has heard that nobody does.
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_engine_without_a_home_for_kv_hands_nothing_over(native: Any) -> None:
    first, second = await native.awake(), await native.awake(kv_home=None)
    await generate(first, new_tokens=30)
    await generate(second, new_tokens=30)
    with pytest.raises(KvUnavailable, match="no home"):
        await second.export_kv("s")
    with pytest.raises(KvUnavailable, match="no home"):
        await second.import_kv(await first.export_kv("s"))


async def test_asleep_its_pool_is_no_region_any_more(native: Any, shm: Path) -> None:
    engine = await native.awake()
    await generate(engine, new_tokens=30)
    await engine.export_kv("s")
    await engine.sleep()
    assert [name for name in os.listdir(shm) if not name.startswith(".")] == []


# On a GPU the mode wants bfloat16.
@pytest.mark.parametrize("batch_invariant", [False, True] if DEVICE.type == "cpu" else [False])
@pytest.mark.parametrize("on_publish", ["recompute", "keep"])
async def test_a_version_that_is_broken_spoils_no_later_one(
    native: Any, batch_invariant: bool, on_publish: str
) -> None:
    """Its KV is not finite, and stays in blocks that later calls begin to fill."""
    engine = await native.awake(kv_tokens=64, batch_invariant=batch_invariant, on_publish=on_publish)
    tokens = await generate(engine, new_tokens=40)
    broken = copy.deepcopy(native.reference())
    for projection in (broken.model.layers[0].self_attn.k_proj, broken.model.layers[0].self_attn.v_proj):
        projection.weight.data.fill_(float("nan"))
    await engine.update(ModelWeights(1, broken, bool))
    long = GenerateRequest(
        call="long", session="s", prompt_ids=(1,) * 60, prompt_tokens=60, sampling=SamplingParams()
    )
    with pytest.raises(EngineFault, match="not finite under version 1"):
        [chunk async for chunk in engine.generate(long)]
    await engine.update(native.weights(0, version=2))
    assert await generate(engine, new_tokens=40) == tokens
    # Nobody goes on with what it has left.
    assert {
        version for chunk in [one async for one in engine.generate(long)] for version in chunk.versions
    } == {2}


async def test_close_ends_the_thread_it_made(native: Any) -> None:
    engine = await native.awake()
    thread = engine._lane.run(threading.current_thread).result()
    await engine.close()
    thread.join(10.0)
    assert not thread.is_alive()


async def test_an_idle_engine_uses_no_cpu(native: Any) -> None:
    engine = await native.awake()
    await generate(engine)
    used_s: list[float] = []
    while not used_s or used_s[-1] >= 0.03:  # at best: other threads of this process may have work
        assert len(used_s) < 20, used_s
        before_s = time.process_time()
        await asyncio.sleep(0.3)
        used_s.append(time.process_time() - before_s)


def test_models_whose_attention_cannot_be_paged_are_refused() -> None:
    small: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    with pytest.raises(ValueError, match="sliding_attention"):
        NativeEngine(Gemma2ForCausalLM(Gemma2Config(**small)), **OPTIONS)
    with pytest.raises(ValueError, match="sliding_attention"):
        NativeEngine(MistralForCausalLM(MistralConfig(**small, sliding_window=64)), **OPTIONS)
    with pytest.raises(ValueError, match="granite"):
        NativeEngine(GraniteForCausalLM(GraniteConfig(**small)), **OPTIONS)


async def test_bfloat16_models_run(native: Any) -> None:
    model = native.reference().__class__(native.reference().config).to(torch.bfloat16)
    engine = NativeEngine(model, **OPTIONS)
    await engine.wake(native.weights(0))
    assert len(await generate(engine)) == 10
    assert engine._rollout._runner._kv.data.dtype == torch.bfloat16
    await engine.close()


async def test_numbers_over_kept_kv_are_those_of_both_weights(native: NativeCase) -> None:
    engine = await native.awake(on_publish="keep")
    ids = prompt(40)
    await calls.generate(engine, ids)
    await engine.update(native.weights(1))
    longer = (*ids, *prompt(5, seed=1))
    got = await calls.generate(engine, longer)
    assert (got.cached_tokens, set(got.versions), set(got.kv_versions)) == (40, {1}, {0})
    with torch.no_grad():
        past = native.reference(0)(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
        rest = torch.tensor([[*longer[40:], *got.token_ids]])
        logits = native.reference(1)(input_ids=rest, past_key_values=past).logits[0, 4:-1]
    want = logits.float().log_softmax(-1).gather(-1, torch.tensor(got.token_ids)[:, None])[:, 0]
    assert got.logprobs == pytest.approx(want.tolist(), abs=1e-4)


def test_a_pool_of_no_block_is_refused(native: Any) -> None:
    with pytest.raises(ValueError, match="kv_tokens"):
        native.engine(kv_tokens=7)


class Locks:
    """What a device would have locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.times = 0

    def lock(self, pointer: int, nbytes: int) -> None:
        self.times += 1
        self.locked[pointer] = nbytes

    def unlock(self, pointer: int) -> None:
        del self.locked[pointer]


async def test_memory_where_kv_rests_is_locked_once(
    native: NativeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = Locks()
    monkeypatch.setattr("gyre.cell.engine.runner.Runner.page_lock", locks)
    engine = native.engine(kv_rest_bytes=2**16)
    await engine.wake(native.weights(0))
    (nbytes,) = locks.locked.values()
    # Whole blocks, and all are there.
    assert 2**16 - 8192 < nbytes <= 2**16
    (file,) = [native.regions.folder / n for n in os.listdir(native.regions.folder) if n.endswith("-rest-0")]
    assert os.stat(file).st_blocks * 512 >= nbytes
    for turn in range(3):
        await calls.generate(engine, prompt(40, seed=turn))
        assert (await engine.rest_kv(["s"], 10.0)).tokens == 56
        await engine.sleep()
        await engine.wake(native.weights(0))
        assert engine.metrics().kv_bytes_resting == 0
        assert (await calls.generate(engine, prompt(40, seed=turn))).cached_tokens == 32
    assert locks.times == 1 and file.exists()
    await engine.close()
    assert locks.locked == {} and not file.exists()
