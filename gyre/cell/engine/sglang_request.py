"""A call in SGLang's words."""

from __future__ import annotations

from typing import Any

from gyre.cell.engine import draws
from gyre.cell.engine.base import ContextOverflow, FinishReason, GenerateRequest


class Requests:
    """Checks and translates requests for one model: `vocab` tokens, of which `eos` end an answer. Where
    `seeded` the server draws by seed."""

    def __init__(self, window_tokens: int, vocab: int, eos: frozenset[int]) -> None:
        self.window_tokens = window_tokens
        self._vocab = vocab
        self._eos = eos
        self.seeded = False

    def check(self, request: GenerateRequest) -> None:
        """Raises ContextOverflow, and ValueError for what makes no sense."""
        prompt = request.prompt_ids
        if not 0 < request.prompt_tokens <= len(prompt):
            raise ValueError(
                f"prompt_tokens is {request.prompt_tokens}: give 1 to the {len(prompt)} of prompt_ids"
            )
        if request.prompt_tokens >= self.window_tokens:
            raise ContextOverflow(request.prompt_tokens, self.window_tokens)
        # Such a token would kill the server.
        if min(prompt) < 0 or max(prompt) >= self._vocab:
            raise ValueError(
                f"prompt_ids has {min(prompt)} to {max(prompt)}: the model knows 0 to {self._vocab - 1}"
            )
        draws.check(request.sampling)

    def over_already(self, request: GenerateRequest) -> FinishReason | None:
        """Of a call resumed after its last token."""
        wanted = request.sampling
        sampled = request.prompt_ids[request.prompt_tokens :]
        stops = set(wanted.stop_token_ids) | (set() if wanted.ignore_eos else self._eos)
        if sampled and sampled[-1] in stops:
            return "stop"
        full = len(request.prompt_ids) >= self.window_tokens
        return "length" if full or len(sampled) >= wanted.max_new_tokens else None

    def stops_here(self, request: GenerateRequest) -> frozenset[int]:
        """Tokens at which we end the call: told to ignore end tokens, SGLang ignores all others too."""
        return frozenset(request.sampling.stop_token_ids if request.sampling.ignore_eos else ())

    @property
    def _all_tokens(self) -> int:
        """As `top_k`. SGLang draws otherwise where no call of a batch cuts its distribution: so that a draw
        does not depend on the others, each one does."""
        return self._vocab if self.seeded else -1

    def body(self, request: GenerateRequest, rid: str, stream_interval: int = 1) -> dict[str, Any]:
        """To be told of `stream_interval` tokens at a time, after the first."""
        wanted = request.sampling
        end_tokens = min(request.prompt_tokens + wanted.max_new_tokens, self.window_tokens)
        return {
            "rid": rid,
            "input_ids": request.prompt_ids,
            "stream": True,
            "return_logprob": True,
            "return_routed_experts": request.routed_experts,
            "sampling_params": {
                "temperature": wanted.temperature,
                "top_p": wanted.top_p,
                "top_k": wanted.top_k or self._all_tokens,
                "min_p": 0.0,
                "sampling_seed": wanted.seed % (1 << 63),
                "max_new_tokens": end_tokens - len(request.prompt_ids),
                "stop_token_ids": sorted(self._eos.union(wanted.stop_token_ids)),
                "ignore_eos": wanted.ignore_eos,
                "stream_interval": stream_interval,
            },
        }
