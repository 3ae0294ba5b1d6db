"""Engines for the contract suite: each case makes engines, fills them with the weights of a seed, and has a
plain transformers model of the same weights to compare with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from gyre.cell.engine.native import NativeEngine

VOCAB = 97


@cache
def reference_model(kind: str, seed: int) -> PreTrainedModel:
    """One for all tests: nobody changes it."""
    return tiny_model(kind, seed)


def tiny_model(kind: str, seed: int) -> PreTrainedModel:
    """A random fp32 model whose distributions are peaked enough that wrong KV changes tokens."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).eval()


class ModelWeights:
    """A model's parameters as weights of a version; `before` is called when they are opened."""

    def __init__(self, version: int, model: PreTrainedModel, before: Callable[[], object]) -> None:
        self.version = version
        self._model = model
        self._before = before

    @contextmanager
    def open(self) -> Iterator[Mapping[str, torch.Tensor]]:
        self._before()
        yield {name: parameter.detach() for name, parameter in self._model.named_parameters()}


class NativeCase:
    """NativeEngine over a tiny model of one kind."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.engines: list[NativeEngine] = []
        self.models: list[PreTrainedModel] = []

    def reference(self, seed: int = 0) -> PreTrainedModel:
        return reference_model(self._kind, seed)

    def engine(self, **options: Any) -> NativeEngine:
        defaults: dict[str, Any] = {
            "window_tokens": 256,
            "kv_tokens": 4096,
            "block_tokens": 8,
            "max_batch": 16,
            "chunk_interval_s": 0.0,
            "eos_token_ids": (),
        }
        model = tiny_model(self._kind, 12345)
        engine = NativeEngine(model, **(defaults | options))
        self.engines.append(engine)
        self.models.append(model)
        return engine

    def weights(
        self, seed: int, *, version: int | None = None, before: Callable[[], object] = bool
    ) -> ModelWeights:
        """That seed's, as version `seed` if not said otherwise."""
        return ModelWeights(seed if version is None else version, self.reference(seed), before)

    async def awake(self, seed: int = 0, **options: Any) -> NativeEngine:
        """An engine under version `seed`, with that seed's weights."""
        engine = self.engine(**options)
        await engine.wake(self.weights(seed))
        return engine


CASES: dict[str, Callable[[], NativeCase]] = {
    "native-llama": lambda: NativeCase("llama"),
    "native-qwen3": lambda: NativeCase("qwen3"),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=CASES)
async def case(request: pytest.FixtureRequest) -> AsyncIterator[NativeCase]:
    made = CASES[request.param]()
    yield made
    for engine in made.engines:
        await engine.close()


@pytest.fixture
async def native() -> AsyncIterator[NativeCase]:
    """For what only the native engine promises."""
    made = NativeCase("llama")
    yield made
    for engine in made.engines:
        await engine.close()
