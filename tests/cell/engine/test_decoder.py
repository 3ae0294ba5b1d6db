"""The decoder computes what the transformers module does, over that module's own parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gyre.cell.engine.decoder import Decoder, check_model
from gyre.cell.engine.linear import WidenedLinear, pick_linear
from gyre.cell.engine.memory import is_released, release_parameters

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama-biases": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True)),
}


def attend(_: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def made(case: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Decoder]:
    torch.manual_seed(0)
    model: PreTrainedModel = CASES[case]().to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model, Decoder(model, pick_linear(dtype, torch.device("cpu")), 128)


def logits_of(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return decoder.logits(decoder.hidden(ids, torch.arange(len(ids)), attend))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_module(case: str) -> None:
    model, decoder = made(case)
    ids = torch.randint(61, (50,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = model(input_ids=ids[None], use_cache=False).logits[0]
    decoder.attach()
    assert torch.allclose(logits_of(decoder, ids), want, atol=2e-4, rtol=1e-4)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids[None], use_cache=False).logits[0], want)


def test_parameters_that_are_multiplied_together_lie_together_and_stay_the_models() -> None:
    model, decoder = made("qwen2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    identities = [id(parameter) for parameter in model.parameters()]
    decoder.attach()
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    attention = model.model.layers[0].self_attn
    joined = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == joined
    places = [parameter.data_ptr() for parameter in model.parameters()]
    decoder.attach()
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_detached_it_holds_no_memory_of_the_parameters() -> None:
    model, decoder = made("llama")
    decoder.attach()
    decoder.detach()
    release_parameters(model)
    assert all(is_released(parameter) or parameter.numel() == 1 for parameter in model.parameters())
    held = [fused.weight.numel() for layer in decoder._layers for fused in layer.fused]
    assert held == [0] * len(held)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 600])
@pytest.mark.parametrize("biased", [False, True])
def test_a_widened_product_is_the_exact_one_rounded_once_at_most(rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator).bfloat16()
    weight = torch.randn(70, 96, generator=generator).bfloat16()
    bias = torch.randn(70, generator=generator).bfloat16() if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = WidenedLinear()(x, weight, bias)
    if got.dtype == torch.float32:
        assert torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-5)
    else:
        # Half a unit in the last of 8 bits, and a little for sums that lie between two numbers.
        assert torch.allclose(got.double(), exact, rtol=2.0**-7, atol=2e-2)


def test_a_wide_weight_is_widened_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.cell.engine.linear._TILE_ELEMENTS", 96 * 7)
    monkeypatch.setattr("gyre.cell.engine.linear._TILE_ROWS", 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 96, generator=generator).bfloat16()
    weight = torch.randn(70, 96, generator=generator).bfloat16()
    whole = torch.mm(x.float(), weight.float().t()).bfloat16()
    assert torch.allclose(WidenedLinear()(x, weight, None).float(), whole.float(), rtol=2.0**-7, atol=1e-3)


def test_a_shape_that_is_computed_otherwise_is_refused() -> None:
    model, _ = made("llama")
    model.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="gelu"):
        check_model(model)
    model.config.hidden_act = "silu"
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="dynamic"):
        check_model(model)
