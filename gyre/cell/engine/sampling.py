"""Drawing tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from gyre.cell.engine.base import SamplingParams
from gyre.cell.engine.draws import uniform


def sample(
    logits: torch.Tensor, params: SequenceOf[SamplingParams], positions: SequenceOf[int]
) -> tuple[list[int], list[float]]:
    """One token a row of `logits` [rows, vocab], and its log-probability as `Chunk` defines it."""
    device = logits.device
    greedy = [p.temperature == 0.0 for p in params]
    scores = logits.float()
    if any(p.temperature not in (0.0, 1.0) for p in params):
        scale = torch.tensor([p.temperature or 1.0 for p in params], device=device)
        scores = scores / scale[:, None]
    logprobs = scores.log_softmax(-1)
    if all(greedy):
        tokens = logits.argmax(-1, keepdim=True)
    else:
        weights = logprobs.exp()
        if any(p.top_k or p.top_p < 1.0 for p in params):
            weights = _filter(weights, params)
        tokens = _draw(weights, [uniform(p.seed, at) for p, at in zip(params, positions, strict=True)])
        if any(greedy):
            tokens = torch.where(
                torch.tensor(greedy, device=device)[:, None], logits.argmax(-1, keepdim=True), tokens
            )
    chosen = logprobs.gather(-1, tokens)
    # One copy to the host; float64 holds token ids and float32 exactly.
    ids, values = torch.cat((tokens.double(), chosen.double()), dim=-1).T.tolist()
    return [int(token) for token in ids], values


def _draw(weights: torch.Tensor, numbers: SequenceOf[float]) -> torch.Tensor:
    """Inverse-CDF in vocabulary order: rounding moves a boundary by an ulp, never the order of tokens."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    at = torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True).clamp_(max=weights.shape[-1] - 1)


def _filter(probs: torch.Tensor, params: SequenceOf[SamplingParams]) -> torch.Tensor:
    """Zeroes what top-k, then top-p of the rest, exclude. Rows without either stay as they are."""
    vocab = probs.shape[-1]
    device = probs.device
    top_k = torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.double().masked_fill(torch.arange(vocab, device=device) >= top_k, 0.0)
    before = ordered.cumsum(-1) - ordered
    ordered.masked_fill_((before >= top_p * ordered.sum(-1, keepdim=True)) & (top_p < 1.0), 0.0)
    return torch.zeros_like(ordered).scatter_(-1, order, ordered)
