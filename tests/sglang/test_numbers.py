"""Other models than the contract suite's, and the numbers of bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gyre.cell.engine import SamplingParams
from tests.cell.engine.calls import VOCAB, chunks_of, generate, joined, prompt, request
from tests.cell.engine.conftest import ModelWeights
from tests.sglang.conftest import Pool, SglangCase

MakeCase = Callable[..., SglangCase]


async def test_tied_embeddings_and_norms_of_queries_and_keys(make_case: MakeCase) -> None:
    case = make_case("qwen3")
    engine = await case.awake(seed=1)
    sampling = SamplingParams(temperature=0.8, max_new_tokens=40)
    got = await generate(engine, prompt(21), sampling)
    want = case.logprobs(prompt(21), got.token_ids, 0.8, seed=1)
    assert max(abs(a - b) for a, b in zip(got.logprobs, want, strict=True)) < case.tolerance


class FromFile:
    """Weights under the names of a checkpoint, where a model of experts has others while it runs."""

    def __init__(self, version: int, folder: Path) -> None:
        self.version = version
        self._path = folder / "model.safetensors"

    @contextmanager
    def open(self) -> Iterator[Mapping[str, Tensor]]:
        yield load_file(self._path)


class Bfloat16:
    """Weights as they are served."""

    def __init__(self, weights: ModelWeights) -> None:
        self.version = weights.version
        self._weights = weights

    @contextmanager
    def open(self) -> Iterator[Mapping[str, Tensor]]:
        with self._weights.open() as tensors:
            yield {name: tensor.bfloat16() for name, tensor in tensors.items()}


async def test_the_distribution_of_differences_in_bfloat16(make_case: MakeCase) -> None:
    case = make_case("llama")
    engine = case.engine(dtype="bfloat16")
    await engine.wake(Bfloat16(case.weights(0)))
    differences: list[float] = []
    for seed in range(8):
        sampling = SamplingParams(seed=seed, max_new_tokens=60)
        got = await generate(engine, prompt(20, seed), sampling)
        want = case.logprobs(prompt(20, seed), got.token_ids)
        differences += [abs(a - b) for a, b in zip(got.logprobs, want, strict=True)]
    found = np.quantile(differences, [0.5, 0.9, 0.99, 1.0]).round(4).tolist()
    print(f"|SGLang in bfloat16 - transformers in float32| over {len(differences)} tokens: {found}")
    assert found[0] < 0.05


async def test_the_experts_that_a_model_took_are_told(make_case: MakeCase, pool: Pool) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    folder = pool.folder("moe")
    model.save_pretrained(folder)
    case = make_case("llama")
    engine = case.engine(model_folder=folder, routed_experts=True)
    await engine.wake(FromFile(0, folder))
    asked = request(prompt(12), SamplingParams(temperature=0.0, max_new_tokens=6))
    chunks = await chunks_of(engine, msgspec.structs.replace(asked, routed_experts=True))
    got = joined(chunks)
    assert [chunk.routed_experts is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    experts = np.frombuffer(chunks[-1].routed_experts or b"", "<i4").reshape(17, 2, 2)
    with torch.no_grad():
        whole = torch.tensor([[*prompt(12), *got.token_ids]])
        routers = model(input_ids=whole, output_router_logits=True).router_logits
    for layer, logits in enumerate(routers):
        want = logits[:17].topk(2, dim=-1).indices.sort(-1).values
        assert np.array_equal(np.sort(experts[:, layer], axis=-1), want.numpy())
