from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engine import numbers, pool, speed
from benchmarks.engine.models import ModuleWeights
from benchmarks.engine.native import Plain, native
from benchmarks.engine.vllm import Vllm, vllm
from benchmarks.engine.work import LAST_ID, Work
from benchmarks.report import Report

SHAPE: dict[str, Any] = {
    "vocab_size": LAST_ID,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}


def small() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def test_decode_is_judged_by_its_middle_step_and_prefill_by_the_first_token() -> None:
    assert Work(4, 64, 5).tokens_per_s([9.0, 9.5, 10.0, 12.0, 12.5]) == 8.0
    assert Work(2, 100, 1).tokens_per_s([0.5]) == 400.0
    assert Work(4, 64, 5, "all").tokens_per_s([9.0, 9.0, 9.5, 10.0, 10.0]) == 12.0
    assert Work(4, 64, 5, "whole").tokens_per_s([9.0, 9.0, 9.5, 10.0, 10.0]) == 2.0


@pytest.mark.parametrize("batch", [1, 3])
async def test_every_peer_brings_a_token_a_step(batch: int) -> None:
    work = Work(batch, 40, 6)
    async with native("native", small()) as engine:
        for peer in (engine, Plain(small())):
            arrivals_s = await peer.arrivals_s(work)
            assert len(arrivals_s) == 6
            assert arrivals_s == sorted(arrivals_s)


async def test_ratios_and_figures_are_told_by_name() -> None:
    report = Report("engine")
    works = {"decode_2": Work(2, 16, 4), "prefill": Work(1, 64, 1)}
    async with native("native", small()) as engine, native("other", small(), batch_invariant=True) as other:
        found = await speed.measured([engine, other], works, rounds=2)
        speed.told(report, "float32", found)
        speed.compared(report, "float32", found, ("other", "native"), [("decode_2", 0.0)])
        await pool.prefix(report, "float32", engine, rounds=1)
        await pool.overhead(report, engine, calls=4)
    assert set(report.figures) == {
        "float32.decode_2.native_tokens_per_s",
        "float32.decode_2.other_tokens_per_s",
        "float32.prefill.native_tokens_per_s",
        "float32.prefill.other_tokens_per_s",
        "float32.first_prefill_s",
        "float32.repeated_prefill_s",
    }
    assert report.gates["float32.decode_2.other_to_native_ratio"].met
    assert report.gates["pool.overhead_ratio"].met


async def test_recorded_log_probabilities_are_those_of_transformers() -> None:
    model = small()
    async with native("native", small()) as engine:
        await engine.engine.update(ModuleWeights(model))
        found = await numbers.differences(engine, model, calls=2)
    assert len(found) == 2 * numbers.NEW_TOKENS
    assert float(found.abs().max()) < 1e-4
    report = Report("engine")
    numbers.told(report, "logprobs", found)
    assert report.figures["logprobs_p50_nats"] <= report.figures["logprobs_p100_nats"]


async def test_without_an_interpreter_there_is_no_vllm_and_a_reason(tmp_path: Any) -> None:
    async with vllm(None, tmp_path, "bfloat16", 2) as peer:
        assert not isinstance(peer, Vllm)
        assert "--vllm-python" in peer
