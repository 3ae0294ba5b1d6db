"""One call inside an engine: its tokens, their KV so far, and what its caller has not been told yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre.cell.engine.base import Chunk, FinishReason, GenerateRequest
from gyre.cell.engine.blocks import CachedBlock
from gyre.cell.engine.prefixes import Digests
from gyre.cell.engine.sampled import SampledLeg


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are prompt and output; KV of the first `computed` is in the blocks of `table`, of which those
    in `chain` are full and shared. `kv_version`: of the weights that the oldest of its KV is of.
    `end_tokens` is the length at which it ends."""

    request: GenerateRequest
    tokens: list[int]
    end_tokens: int
    stop_ids: frozenset[int]
    chunked_at_s: float
    computed: int = 0
    table: list[int] = field(default_factory=list)
    chain: list[CachedBlock] = field(default_factory=list)
    kv_version: int = -1
    digests: Digests = field(default_factory=dict)
    sealable: bool = True
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    new_ids: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)
    new_versions: list[int] = field(default_factory=list)
    new_kv_versions: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not computed; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def position(self) -> int:
        """The place of the next token among the sampled ones: what its random draw depends on."""
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def leg(self) -> SampledLeg:
        """What was sampled of it here."""
        request = self.request
        tokens = len(self.tokens) - len(request.prompt_ids)
        return SampledLeg(call=request.call, stay=request.stay, tokens=tokens)

    def check_finished(self) -> None:
        """Sets the finish reason if the tokens so far end the call."""
        if self.position > 0 and self.tokens[-1] in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.end_tokens:
            self.finish_reason = "length"

    def append(self, token: int, logprob: float, version: int) -> None:
        """Adds a sampled token."""
        self.tokens.append(token)
        self.new_ids.append(token)
        self.new_logprobs.append(logprob)
        self.new_versions.append(version)
        self.new_kv_versions.append(self.kv_version)
        self.check_finished()

    def take_chunk(self, now_s: float) -> Chunk:
        """What was sampled since the chunk before."""
        chunk = Chunk(
            token_ids=tuple(self.new_ids),
            logprobs=tuple(self.new_logprobs),
            versions=tuple(self.new_versions),
            kv_versions=tuple(self.new_kv_versions) if self.new_kv_versions != self.new_versions else (),
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens or 0,
        )
        self.new_ids.clear()
        self.new_logprobs.clear()
        self.new_versions.clear()
        self.new_kv_versions.clear()
        self.chunked_at_s = now_s
        return chunk
