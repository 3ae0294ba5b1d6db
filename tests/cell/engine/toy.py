"""A language model in a few lines, for an engine that samples what is written down."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from gyre.cell.engine import GenerateRequest
from gyre.cell.engine.draws import uniform
from tests.cell.engine.calls import VOCAB


def logprobs(tokens: Sequence[int], version: int, temperature: float) -> list[float]:
    """Of each next token: they depend on all tokens and on the version, as a model's do."""
    draw = random.Random(f"{version}:{list(tokens)}")
    logits = [draw.gauss(0.0, 2.0) / (temperature or 1.0) for _ in range(VOCAB)]
    most = max(logits)
    total = most + math.log(sum(math.exp(logit - most) for logit in logits))
    return [logit - total for logit in logits]


def sample(request: GenerateRequest, tokens: Sequence[int], version: int) -> tuple[int, float]:
    sampling = request.sampling
    found = logprobs(tokens, version, sampling.temperature)
    ranked = sorted(range(VOCAB), key=found.__getitem__, reverse=True)
    if sampling.temperature == 0.0:
        return ranked[0], found[ranked[0]]
    kept = ranked[: sampling.top_k or VOCAB]
    rest = uniform(sampling.seed, len(tokens) - request.prompt_tokens) * sum(math.exp(found[t]) for t in kept)
    for token in kept:
        rest -= math.exp(found[token])
        if rest < 0.0:
            break
    return token, found[token]


def logprobs_of(
    ids: Sequence[int], out: Sequence[int], version: int, temperature: float = 1.0
) -> list[float]:
    """Of each token of `out` after `ids`."""
    whole = [*ids, *out]
    return [logprobs(whole[: len(ids) + at], version, temperature)[token] for at, token in enumerate(out)]


def greedy(ids: Sequence[int], count: int, version: int) -> tuple[int, ...]:
    tokens = list(ids)
    for _ in range(count):
        found = logprobs(tokens, version, 1.0)
        tokens.append(max(range(VOCAB), key=found.__getitem__))
    return tuple(tokens[len(ids) :])
