"""An engine without a model: what it samples, how long that takes and how it fails is written down.

All else is as in the native engine: batches, chunked prefill, blocks, prefix reuse, KV that is handed over.
It lives on the event loop and its clock, also a virtual one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.cell.engine.base import (
    EngineAsleep,
    EngineFault,
    EngineMetrics,
    GenerateRequest,
    KvLayout,
    OnPublish,
    Weights,
)
from gyre.cell.engine.driven import DrivenEngine
from gyre.cell.engine.handover import KvMemory
from gyre.cell.engine.kv_home import KvHome, PoolFile
from gyre.cell.engine.scheduler import Span
from gyre.rdma import RegionHandle

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R")

# A token's place and version are one int32.
_PLACE_BITS = 21
_VERSIONS = 1 << 10

Sample = Callable[[GenerateRequest, Sequence[int], int], tuple[int, float]]
"""Of a call, its tokens so far (prompt and output) and the weight version: the next token and its
log-probability. One that is not finite fails the call, what is raised fails all calls: so a pass fails."""

PassTime = Callable[[int, int], float]
"""Of the calls that decode and the prompt tokens that wait to be computed: the seconds of the pass that
begins now. A call that comes before they are over is in it."""


class SampledToken(NamedTuple):
    """Of a call, the token at `position` of its output."""

    call: str
    position: int
    token: int
    logprob: float
    version: int


def answers(answer: Callable[[GenerateRequest], Sequence[int]], end: int, logprob: float = -0.5) -> Sample:
    """Samples a whole answer, the same however often it is resumed, then the token `end`."""

    def sample(request: GenerateRequest, tokens: Sequence[int], version: int) -> tuple[int, float]:
        whole = answer(request)
        position = len(tokens) - request.prompt_tokens
        return (whole[position] if position < len(whole) else end), logprob

    return sample


def at_once(decoding: int, prompt_tokens: int) -> float:
    """Passes take no time."""
    return 0.0


class NoWeights:
    """Weights of a version, and nothing in them: what a script needs to be woken or updated."""

    def __init__(self, version: int) -> None:
        self.version = version

    def open(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        return nullcontext({})


class ScriptedEngine(DrivenEngine):
    """An `Engine` that samples what `sample` says. A pass ends `pass_s` after it could begin, weights are
    there `load_s` after they are given; they are opened in a thread, as others read them, unless
    `open_weights` is false. `tokens`, where `keep_tokens`, are all that it has sampled."""

    def __init__(
        self,
        sample: Sample,
        *,
        vocab: int,
        window_tokens: int = 2048,
        kv_tokens: int = 16384,
        block_tokens: int = 16,
        max_batch: int = 16,
        chunk_interval_s: float = 0.0,
        eos_token_ids: tuple[int, ...] = (),
        step_tokens: int = 512,
        pass_s: PassTime = at_once,
        load_s: float = 0.0,
        open_weights: bool = True,
        kv_home: KvHome | None = None,
        on_publish: OnPublish = "recompute",
        kv_rest_bytes: int = 0,
        keep_tokens: bool = False,
    ) -> None:
        self.tokens: list[SampledToken] = []
        self._script = _Script(
            _kept(sample, self.tokens) if keep_tokens else sample,
            vocab,
            kv_tokens // block_tokens,
            block_tokens,
            kv_home and kv_home.file,
        )
        self._loop_lane = LoopLane(lambda: pass_s(*self._rollout.planned()))
        super().__init__(
            self._script,
            self._loop_lane,
            lambda: asyncio.get_running_loop().time(),
            window_tokens=window_tokens,
            kv_tokens=kv_tokens,
            block_tokens=block_tokens,
            max_batch=max_batch,
            chunk_interval_s=chunk_interval_s,
            eos_token_ids=eos_token_ids,
            step_tokens=step_tokens,
            kv_home=kv_home,
            on_publish=on_publish,
            kv_rest_bytes=kv_rest_bytes,
        )
        self._load_s = load_s
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights") if open_weights else None
        self._changing = asyncio.Lock()
        self._lost = asyncio.Event()

    async def lose(self, why: str) -> None:
        """As when what an engine computes with dies: calls fail, `watch` says so, nothing works any more."""
        self._script.lost = why
        await self._on_lane(lambda: self._rollout.fail_all(EngineFault(why)))
        self._lost.set()

    async def watch(self) -> None:
        await self._lost.wait()
        raise EngineFault(f"the engine is lost: {self._script.lost}")

    async def sleep(self) -> None:
        async with self._changing:
            await super().sleep()

    async def wake(self, weights: Weights) -> None:
        async with self._changing:
            await self._load(weights)
            await super().wake(weights)

    async def update(self, weights: Weights) -> None:
        async with self._changing:
            if self.version is None:
                raise EngineAsleep("the engine is asleep: use wake")
            try:
                await self._load(weights)
            except Exception:
                await super().sleep()
                raise
            await super().update(weights)

    def metrics(self) -> EngineMetrics:
        found = super().metrics()
        return msgspec.structs.replace(found, busy_s=found.busy_s + self._loop_lane.passes_s)

    async def close(self) -> None:
        await super().close()
        if self._reader is not None:
            self._reader.shutdown(wait=False)

    async def _load(self, weights: Weights) -> None:
        await asyncio.sleep(self._load_s)
        if self._reader is not None:
            await asyncio.get_running_loop().run_in_executor(self._reader, _open, weights)


def _kept(sample: Sample, tokens: list[SampledToken]) -> Sample:
    def keeping(request: GenerateRequest, so_far: Sequence[int], version: int) -> tuple[int, float]:
        token, logprob = sample(request, so_far, version)
        if math.isfinite(logprob):
            position = len(so_far) - request.prompt_tokens
            tokens.append(SampledToken(request.call, position, token, logprob, version))
        return token, logprob

    return keeping


def _open(weights: Weights) -> None:
    with weights.open():
        pass


class LoopLane:
    """The event loop itself: a job is done at once, a pass when its time is over."""

    def __init__(self, pass_s: Callable[[], float]) -> None:
        self._pass_s = pass_s
        self.passes_s = 0.0

    def run(self, job: Callable[[], R]) -> Future[R]:
        done: Future[R] = Future()
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)
        return done

    def run_pass(self, job: Callable[[], None]) -> None:
        seconds = self._pass_s()
        self.passes_s += seconds
        asyncio.get_running_loop().call_later(seconds, job)

    def tell(self, callback: Callable[[], None]) -> None:
        callback()

    def close(self) -> None:
        """Nothing is left."""


class _Script:
    """Runs passes of a script. The KV of a token is the token, its place and the version of the weights, so
    that a block that holds anything else, or is of weights that its sequence does not say, is noticed: keys
    are tokens, values positions and versions, in the second head with all bits turned."""

    def __init__(
        self, sample: Sample, vocab: int, blocks: int, block_tokens: int, file: PoolFile | None
    ) -> None:
        self.vocab = vocab
        self.lost: str | None = None
        self._sample = sample
        self._version = 0
        self._block_tokens = block_tokens
        self._shape = (blocks, 1, 2, block_tokens, 2, 1)
        self._file = file
        self._handle: RegionHandle | None = None
        self._kv: NDArray[np.int32] = np.zeros((0, *self._shape[1:]), np.int32)

    def run(self, spans: list[Span]) -> list[tuple[Span, int, float]]:
        if self.lost is not None:
            raise EngineFault(self.lost)
        for span in spans:
            self._write(span)
        return [(span, *self._draw(span)) for span in spans if span.samples]

    def take_weights(self, weights: Weights) -> None:
        if self.lost is not None:
            raise EngineFault(self.lost)
        self._version = weights.version

    def release_weights(self) -> None:
        """There are none."""

    def take_kv(self) -> None:
        if self._file is None:
            self._kv = np.zeros(self._shape, np.int32)
        elif self._handle is None:
            shared, name, _ = self._file
            shared.free(RegionHandle(backend="shm", name=name, nbytes=0))
            region = shared.allocate(name, 4 * math.prod(self._shape))
            self._kv = np.frombuffer(region.buffer, np.int32).reshape(self._shape)
            self._handle = region.handle

    def release_kv(self) -> None:
        self._kv = self._kv[:0].copy()
        if self._file is not None and self._handle is not None:
            self._file.shared.free(self._handle)
            self._handle = None

    def kv_layout(self, version: int) -> KvLayout:
        return KvLayout(
            model="scripted",
            adapter="",
            version=version,
            dtype="int32",
            layers=1,
            block_tokens=self._block_tokens,
            kv_heads=2,
            head_dim=1,
        )

    def kv_memory(self) -> tuple[KvMemory, ...]:
        return (KvMemory((0, 2), self._kv, self._handle),)

    @property
    def slot_blocks(self) -> int:
        """Others read the pool itself."""
        return 0

    def fill_slot(self, blocks: Sequence[int], slot: int) -> None:
        """There is none."""

    def read_kv(self, rank: int, blocks: Sequence[int], target: memoryview) -> None:
        np.frombuffer(target, np.int32).reshape(-1, *self._shape[1:])[:] = self._kv[list(blocks)]

    @property
    def page_lock(self) -> None:
        """No GPU reads it."""

    def settle(self) -> None:
        """A pass is over when it is over."""

    def sums(self, rank: int, blocks: Sequence[int]) -> bytes:
        return _sums(self._kv[list(blocks)])

    def finite_sums(self, rank: int, blocks: Sequence[int]) -> bytes | None:
        """Integers are finite; a block whose heads contradict each other passes for one that is not."""
        found = self._kv[list(blocks)]
        return _sums(found) if (found[..., 0, :] == ~found[..., 1, :]).all() else None

    def write_kv(self, rank: int, blocks: Sequence[int], heads: tuple[int, int], source: memoryview) -> bytes:
        shape = (-1, *self._shape[1:4], heads[1] - heads[0], 1)
        found = np.frombuffer(source, np.int32).reshape(shape)
        self._kv[list(blocks), :, :, :, heads[0] : heads[1]] = found
        return _sums(found)

    def _write(self, span: Span) -> None:
        places = np.arange(span.start, span.start + span.count)
        tokens = np.array(span.sequence.tokens[span.start : span.start + span.count])
        blocks = np.array(span.sequence.table)[places // self._block_tokens]
        for half, values in enumerate((tokens, places | (self._version % _VERSIONS << _PLACE_BITS))):
            for head, turned in enumerate((values, ~values)):
                self._kv[blocks, 0, half, places % self._block_tokens, head, 0] = turned

    def _draw(self, span: Span) -> tuple[int, float]:
        tokens = span.sequence.tokens
        used = span.sequence.table[: -(-len(tokens) // self._block_tokens)]
        # [2, tokens, heads]: of keys and of values.
        found = self._kv[used, 0, :, :, :, 0].swapaxes(0, 1).reshape(2, -1, 2)[:, : len(tokens)]
        places = found[1, :, 0] & ((1 << _PLACE_BITS) - 1)
        ages = (self._version - (found[1, :, 0] >> _PLACE_BITS)) % _VERSIONS
        if not (
            (found[0, :, 0] == np.array(tokens)).all()
            and (places == np.arange(len(tokens))).all()
            and (found[..., 0] == ~found[..., 1]).all()
            and (ages <= self._version - span.sequence.kv_version).all()
        ):
            return 0, float("nan")
        return self._sample(span.sequence.request, tokens, self._version)


def _sums(blocks: NDArray[np.int32]) -> bytes:
    words: NDArray[np.int64] = blocks.reshape(len(blocks), -1).view(np.int64)
    return bytes(words.sum(1).data)
