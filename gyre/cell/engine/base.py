"""The engine contract: what a cell in rollout role offers, whoever computes it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "abort"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. The draw at a position is a function of (`seed`, position) and the logits
    alone, so that a call that is resumed elsewhere continues as it would have. `temperature` 0 is greedy;
    `top_k` 0 and `top_p` 1 keep all tokens. The call ends with an end token of the model or of
    `stop_token_ids`, which is part of the output, or when `max_new_tokens` were sampled, those before a
    resume included."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `prompt_ids` is the prompt plus, for a resumed call, the tokens sampled so far;
    `prompt_tokens` is the length of the prompt alone: positions for the random draws and `max_new_tokens`
    count from there.
    `session` names the execution, for prefix reuse."""

    call: str
    session: str
    prompt_ids: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a call since the chunk before: `token_ids`, their log-probabilities under
    softmax(logits / temperature) before top-k and top-p (at temperature 0: softmax(logits)), and the weight
    version of each.
    The last chunk of a call, and only it, has a `finish_reason`. `cached_tokens`, the same in each chunk:
    tokens of `prompt_ids` whose KV was there already."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start, and gauges now."""

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    busy_s: float = 0.0


class ContextOverflow(ValueError):
    """The prompt leaves no room for one token in the model's window."""

    def __init__(self, prompt_tokens: int, window_tokens: int) -> None:
        super().__init__(f"prompt is too long: {prompt_tokens} tokens > {window_tokens} maximum")
        self.prompt_tokens = prompt_tokens
        self.window_tokens = window_tokens


class EngineAsleep(RuntimeError):
    """The engine was asked to generate while its cell is not in rollout role."""


class EngineFault(RuntimeError):
    """A forward pass of the engine failed; the call was not answered, and may be elsewhere."""


class Engine(Protocol):
    """A rollout engine. Asynchronous methods may be called from one event loop, many at a time."""

    @property
    def version(self) -> int | None:
        """The weight version it serves, None while asleep."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Yields chunks until one with a finish reason. Raises ContextOverflow, EngineAsleep, EngineFault,
        and ValueError for a request that makes no sense. Closing the iterator aborts the call."""

    async def abort(self, call: str) -> None:
        """Ends a call at once: its iterator yields a last chunk with finish reason `abort`."""

    async def abort_all(self) -> None:
        """Ends all calls so."""

    async def sleep(self) -> None:
        """Aborts what runs, then frees weights and KV."""

    async def wake(self, version: int, load: Callable[[], None]) -> None:
        """Takes weights and KV memory, calls `load`, which fills the weights, and admits calls."""

    async def update(self, version: int, load: Callable[[], None]) -> None:
        """Swaps weights under live calls: `load` is called between two forward passes; KV of the
        older version is dropped and what is live is computed again."""

    def metrics(self) -> EngineMetrics:
        """Counters and gauges."""

    async def close(self) -> None:
        """Ends all calls and the engine's thread."""
