"""Engines, and transformers' own `generate`, as peers."""

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
from gyre.cell.engine import Chunk, Engine, GenerateRequest, SamplingParams
from gyre.cell.engine.native import NativeEngine

WINDOW_TOKENS = 2048


def greedy(call: str, ids: Sequence[int], new_tokens: int) -> GenerateRequest:
    """A call that runs to its full length."""
    return GenerateRequest(
        call=call,
        session=call,
        prompt_ids=tuple(ids),
        prompt_tokens=len(ids),
        sampling=SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True),
    )


async def answer(engine: Engine, call: str, ids: Sequence[int], new_tokens: int) -> list[Chunk]:
    """The chunks of a greedy call."""
    return [chunk async for chunk in engine.generate(greedy(call, ids, new_tokens))]


class Native:
    """Calls to an engine, all at once."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self._draw = random.Random(name)

    async def arrivals_s(self, work: Work) -> list[float]:
        """The last call's, which are the latest."""
        start = perf_counter()
        calls = (
            self._arrivals(f"c{i}", ids, work.new_tokens, start)
            for i, ids in enumerate(work.prompts(self._draw))
        )
        return (await asyncio.gather(*calls))[-1]

    async def _arrivals(self, call: str, ids: Sequence[int], new_tokens: int, start: float) -> list[float]:
        request = greedy(call, ids, new_tokens)
        arrivals_s: list[float] = []
        async for chunk in self.engine.generate(request):
            arrivals_s.extend([perf_counter() - start] * len(chunk.token_ids))
        return arrivals_s


@asynccontextmanager
async def native(name: str, model: PreTrainedModel, **options: Any) -> AsyncIterator[Native]:
    """An engine over `model`, awake with the weights it has."""
    defaults: dict[str, Any] = {
        "window_tokens": WINDOW_TOKENS,
        "kv_tokens": 16384,
        "block_tokens": 16,
        "max_batch": 16,
        "chunk_interval_s": 0.0,
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

    async def arrivals_s(self, work: Work) -> list[float]:
        prompts = work.prompts(self._draw)
        return await asyncio.to_thread(self._generate, prompts, work.new_tokens)

    @torch.inference_mode()
    def _generate(self, prompts: list[tuple[int, ...]], new_tokens: int) -> list[float]:
        ids = torch.tensor(prompts, device=self._model.device)
        arrivals_s: list[float] = []
        start = perf_counter()

        def arrived(found: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            # The copy waits for the device.
            found[:, -1].tolist()
            arrivals_s.append(perf_counter() - start)
            return torch.full((len(found),), len(arrivals_s) == new_tokens, device=found.device)

        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens + 1,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[arrived],
        )
        return arrivals_s
