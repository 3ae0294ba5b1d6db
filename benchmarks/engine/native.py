"""The native engine, and transformers' own `generate`, as peers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.engine.models import ModuleWeights
from benchmarks.engine.work import Work
from gyre.cell.engine import Chunk, GenerateRequest, SamplingParams
from gyre.cell.engine.native import NativeEngine

WINDOW_TOKENS = 2048


async def answer(engine: NativeEngine, call: str, ids: Sequence[int], new_tokens: int) -> list[Chunk]:
    """The chunks of one greedy call that runs to its full length."""
    request = GenerateRequest(
        call=call,
        session=call,
        prompt_ids=tuple(ids),
        prompt_tokens=len(ids),
        sampling=SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True),
    )
    return [chunk async for chunk in engine.generate(request)]


class Native:
    """Calls to an engine, all at once."""

    def __init__(self, name: str, engine: NativeEngine) -> None:
        self.name = name
        self.engine = engine
        self._draw = random.Random(name)

    async def seconds(self, work: Work) -> float:
        prompts = work.prompts(self._draw)
        start = perf_counter()
        await asyncio.gather(
            *(answer(self.engine, f"c{i}", ids, work.new_tokens) for i, ids in enumerate(prompts))
        )
        return perf_counter() - start


@asynccontextmanager
async def native(name: str, model: PreTrainedModel, **options: Any) -> AsyncIterator[Native]:
    """An engine over `model`, awake with the weights it has."""
    defaults: dict[str, Any] = {
        "window_tokens": WINDOW_TOKENS,
        "kv_tokens": 16384,
        "block_tokens": 16,
        "max_batch": 16,
        "chunk_interval_s": 60.0,
        "eos_token_ids": (),
    }
    engine = NativeEngine(model, **(defaults | options))
    await engine.wake(ModuleWeights(model))
    try:
        yield Native(name, engine)
    finally:
        await engine.close()


class Plain:
    """transformers' `generate` over one batch of equal prompts, which is what suits it best."""

    name = "transformers"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._draw = random.Random(self.name)

    async def seconds(self, work: Work) -> float:
        prompts = work.prompts(self._draw)
        start = perf_counter()
        await asyncio.to_thread(self._generate, prompts, work.new_tokens)
        return perf_counter() - start

    @torch.inference_mode()
    def _generate(self, prompts: list[tuple[int, ...]], new_tokens: int) -> None:
        ids = torch.tensor(prompts, device=self._model.device)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        # The copy waits for the device.
        assert out[:, -new_tokens:].tolist()
