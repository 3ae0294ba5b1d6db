"""The engine contract: what a cell in rollout role offers, whoever computes it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from gyre.cell.engine.sampled import SampledLeg
from gyre.rdma import RegionHandle

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
OnPublish = Literal["recompute", "keep"]

# How long KV stays pinned where nobody says that it was read, or is not wanted any more.
KV_LEASE_S = 30.0
# Of the sum of a block.
SUM_BYTES = 8


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. The draw at a position is a function of (`seed`, position) and the logits
    alone, so that a call that is resumed elsewhere continues as it would have. `temperature` 0 is greedy;
    `top_k` 0 and `top_p` 1 keep all tokens. The call ends with an end token of the model or of
    `stop_token_ids`, which is part of the output, or when `max_new_tokens` were sampled, those before a
    resume included. With `ignore_eos` an end token of the model is a token like any other."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `prompt_ids` is the prompt plus, for a resumed call, the tokens sampled so far;
    `prompt_tokens` is the length of the prompt alone: positions for the random draws and `max_new_tokens`
    count from there.
    `session` names the execution, for prefix reuse; `stay` counts the engines that the call was at before.
    With `routed_experts` a model of experts says which ones it took."""

    call: str
    session: str
    prompt_ids: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams
    stay: int = 0
    routed_experts: bool = False


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a call since the chunk before: `token_ids`, their log-probabilities under
    softmax(logits / temperature) before top-k and top-p (at temperature 0: softmax(logits)), and the weight
    version of each. `kv_versions`: of the oldest weights that KV was of which it was sampled over; () where
    that is the version of each itself.
    The last chunk of a call, and only it, has a `finish_reason`. `cached_tokens`, the same in each chunk:
    tokens of `prompt_ids` whose KV was there already. `routed_experts`, only in the last and only if asked
    for: int32 [tokens - 1, layers, experts_per_token] of prompt and output, little-endian."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    kv_versions: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    routed_experts: bytes | None = None


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
    kv_blocks_pinned: int = 0
    kv_tokens_imported: int = 0
    kv_imports_refused: int = 0
    kv_bytes_resting: int = 0
    kv_tokens_rested: int = 0
    kv_tokens_put_back: int = 0
    kv_rests_dropped: int = 0
    mixed_tokens: int = 0
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


class KvUnavailable(RuntimeError):
    """The engine cannot export or import this KV; the reason says why. Who wanted it computes it again."""


class Weights(Protocol):
    """The whole weights of one version. Read from any thread."""

    @property
    def version(self) -> int: ...

    def open(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Parameters by their transformers names, tied ones once, in the dtype they are served in; valid
        within. Raises RegionError where they are gone."""


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a block of KV holds: keys and values [layers, 2, block_tokens, kv_heads, head_dim] of `model`
    with `adapter` under weight `version`: of kept KV the oldest."""

    model: str
    adapter: str
    version: int
    dtype: str
    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int


def divides(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether a model of so many heads can be computed by so many ranks, each with whole heads. Where there
    are more ranks than KV heads, several hold the same."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


class KvPart(msgspec.Struct, frozen=True, kw_only=True):
    """KV heads [heads[0], heads[1]) of a pool, or of a stage, in the memory of one rank: its blocks, one
    after the other. `sums` are those of the manifest's blocks as they were pinned, 8 bytes each,
    little-endian."""

    heads: tuple[int, int]
    region: RegionHandle
    sums: bytes


def pack_ids(ids: Sequence[int]) -> bytes:
    """int32, little-endian: a session has tens of thousands."""
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Raises ValueError where it is cut short."""
    return tuple(array("i", packed))


class KvManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of one session's full blocks, of `tokens` (packed) from the first on; a multiple of
    `block_tokens`. They are the `blocks` of a pool, which stay as they are while the engine holds `pin`: as
    long as `proof` can be read, `lease_s` at most. No weights that computed any of it are newer than
    `newest`. Whoever takes it over hashes the tokens itself. With `slot_blocks` the parts are not pools but
    stages, of slots for so many blocks, and `proof` says who fills them in turn. `resting`: they are in host
    memory, whatever the backend, and belong to an engine that sleeps."""

    session: str
    layout: KvLayout
    newest: int
    tokens: bytes
    blocks: tuple[int, ...]
    parts: tuple[KvPart, ...]
    pin: str
    proof: RegionHandle
    lease_s: float
    slot_blocks: int = 0
    resting: bool = False

    @property
    def length_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def nbytes(self) -> int:
        """Of the blocks, all heads."""
        return len(self.blocks) * self.layout.kv_heads * head_bytes(self.layout)


class KvRested(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions that have KV in host memory, of `tokens` in all, in `nbytes`."""

    sessions: tuple[str, ...] = ()
    tokens: int = 0
    nbytes: int = 0


_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}


def head_bytes(layout: KvLayout) -> int:
    """Of one head of one block, all layers."""
    return layout.layers * 2 * layout.block_tokens * layout.head_dim * _ITEM_BYTES[layout.dtype]


class Engine(Protocol):
    """A rollout engine. Asynchronous methods may be called from one event loop, many at a time."""

    @property
    def version(self) -> int | None:
        """The weight version it serves, None while asleep."""

    @property
    def window_tokens(self) -> int:
        """The most tokens, prompt and output, that a call can have."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Yields chunks until one with a finish reason. Raises ContextOverflow, EngineAsleep, EngineFault,
        and ValueError for a request that makes no sense. Closing the iterator aborts the call."""

    async def abort(self, call: str) -> None:
        """Ends a call at once: its iterator yields a last chunk with finish reason `abort`."""

    async def abort_all(self) -> None:
        """Ends all calls so."""

    async def pause(self) -> None:
        """No further token until `resume`: calls keep what they have, KV stays, new calls wait."""

    async def resume(self) -> None:
        """Goes on after `pause`; nothing where there was none. A sleep or a wake ends a pause too."""

    async def sleep(self) -> None:
        """Aborts what runs, then frees weights and KV."""

    async def wake(self, weights: Weights) -> None:
        """Takes memory for weights and KV, reads the weights and admits calls. If they cannot be read, that
        error is raised and the engine sleeps on."""

    async def update(self, weights: Weights) -> None:
        """Swaps weights under live calls, between two forward passes. KV of the older version is dropped and
        what is live is computed again; an engine that was made to `keep` it goes on with it in the sessions
        that it belongs to, and tells so by `kv_versions`. If they cannot be read, that error is raised and
        the engine falls asleep: what it has is of no version. Raises EngineAsleep."""

    async def export_kv(
        self, session: str, lease_s: float = KV_LEASE_S, call: str | None = None
    ) -> KvManifest:
        """Pins the KV of `call`, where it runs, else of the session's last call, where it is, until
        `release_kv` or for `lease_s`. Raises KvUnavailable, EngineAsleep, RegionError."""

    async def release_kv(self, pin: str) -> bool:
        """Ends a pin. False where it had ended before: then blocks may have changed under who read them."""

    async def import_kv(self, manifest: KvManifest) -> int:
        """Reads it into blocks of its own, which are reserved first, and makes it findable for prompts that
        start with its tokens: how many of them, since only what fits beside the KV of live calls is taken.
        Passes go on meanwhile. Checks layout, sizes and sums. Raises KvUnavailable, EngineAsleep,
        RegionError; then nothing more of it is findable, and nothing reserved."""

    async def rest_kv(self, sessions: Sequence[str], budget_s: float) -> KvRested:
        """Copies what is here of the KV of idle sessions, in their order, to host memory, as far as there is
        room and for `budget_s`. There it rests while the engine sleeps: `export_kv` hands it over meanwhile,
        once, and `wake` puts back what its weights may go on with, before calls come. Raises KvUnavailable
        where none rests, EngineAsleep."""

    async def end_session(self, session: str) -> tuple[SampledLeg, ...]:
        """Aborts its calls. Answers what was sampled for it here since it was forgotten last, asleep too."""

    def forget_session(self, session: str) -> None:
        """What `end_session` answered is written down."""

    def metrics(self) -> EngineMetrics:
        """Counters and gauges."""

    async def watch(self) -> None:
        """Raises EngineFault once the engine cannot answer any more, whatever it is asked: whoever owns it
        ends and starts it again. Else it does not return."""

    async def close(self) -> None:
        """Ends all calls and all that the engine has started."""
