"""How far the engine's recorded log-probabilities are from transformers'."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.engine.native import Native, answer
from benchmarks.engine.work import Work
from benchmarks.report import Report

PROMPT_TOKENS = 100
NEW_TOKENS = 60


async def differences(engine: Native, reference: PreTrainedModel, calls: int) -> torch.Tensor:
    """Of each token that the engine sampled: its log-probability there, less that of a plain forward pass."""
    draw = random.Random("numbers")
    found: list[torch.Tensor] = []
    for number, ids in enumerate(Work(calls, PROMPT_TOKENS, NEW_TOKENS).prompts(draw)):
        chunks = await answer(engine.engine, f"n{number}", ids, NEW_TOKENS)
        out = [token for chunk in chunks for token in chunk.token_ids]
        recorded = torch.tensor([value for chunk in chunks for value in chunk.logprobs])
        found.append(recorded - _logprobs(reference, ids, out))
    return torch.cat(found)


@torch.inference_mode()
def _logprobs(model: Any, ids: tuple[int, ...], out: list[int]) -> torch.Tensor:
    whole = torch.tensor([[*ids, *out]], device=model.device)
    logits = model(input_ids=whole, use_cache=False).logits[0, len(ids) - 1 : -1].float()
    chosen = torch.tensor(out, device=model.device)[:, None]
    values: torch.Tensor = logits.log_softmax(-1).gather(-1, chosen)[:, 0]
    return values.cpu()


def told(report: Report, name: str, found: torch.Tensor) -> None:
    """Mean, and the sizes that half, 90, 99 and all of 100 differences do not exceed."""
    report.figure(f"{name}_mean_nats", float(found.mean()))
    sizes = found.abs()
    for share in (50, 90, 99, 100):
        report.figure(f"{name}_p{share}_nats", float(sizes.quantile(share / 100)))
