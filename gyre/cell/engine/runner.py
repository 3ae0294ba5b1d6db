"""Forward passes of one model over the paged pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from gyre.cell.engine import kv_bytes, memory, sampling
from gyre.cell.engine.base import KvLayout, Weights
from gyre.cell.engine.decoder import Attend, Decoder
from gyre.cell.engine.flash import FlashAttention
from gyre.cell.engine.graphs import DecodeGraphs
from gyre.cell.engine.invariant import (
    InvariantAttention,
    InvariantLinear,
    InvariantScores,
    check_invariant,
    steady_silu,
)
from gyre.cell.engine.linear import pick_linear
from gyre.cell.engine.paged import PagedAttention, PagedKv, PagedPass
from gyre.cell.engine.scheduler import Span


class Runner:
    """A model and its KV pool. All methods belong to the device thread. With `batch_invariant` its numbers do
    not depend on how sequences are batched and cut into passes."""

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: int,
        block_tokens: int,
        window_tokens: int,
        batch_invariant: bool = False,
    ) -> None:
        self._model = model
        dtype, device = model.dtype, model.device
        if batch_invariant:
            check_invariant(dtype, device)
        self._steady = InvariantLinear(dtype, device) if batch_invariant else None
        self._decoder = Decoder(
            model,
            self._steady or pick_linear(dtype, device),
            window_tokens,
            steady_silu if batch_invariant else F.silu,
        )
        self._scores = InvariantScores(self._decoder.head_dim, block_tokens)
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._kv: PagedKv | None = None
        self._graphs: DecodeGraphs | None = None
        self._model_key = kv_bytes.model_key(model.config)

    @property
    def vocab(self) -> int:
        return int(self._model.config.vocab_size)

    @property
    def kv_bytes(self) -> int:
        """Of the pool, 0 while it is not there."""
        return self._kv.data.nbytes if self._kv is not None else 0

    @torch.no_grad()
    def take_weights(self, weights: Weights) -> None:
        """Takes memory for them if they have none, and fills it."""
        self._decoder.attach()
        memory.restore_parameters(self._model)
        if self._steady is not None:
            self._steady.check(self._decoder.weights)
            if self._model.device.type == "cpu":
                self._scores.check()
        with weights.open() as tensors:
            for name, parameter in self._model.named_parameters():
                parameter.copy_(tensors[name])

    def take_kv(self) -> None:
        if self._kv is None:
            decoder = self._decoder
            self._kv = PagedKv(
                decoder.layers,
                decoder.kv_heads,
                decoder.head_dim,
                self._blocks,
                self._block_tokens,
                self._model.dtype,
                self._model.device,
            )
            if self._steady is None and self._model.device.type == "cuda":
                self._graphs = DecodeGraphs(decoder, self._kv)

    def release_kv(self) -> None:
        self._graphs = None
        self._kv = None

    def release_weights(self) -> None:
        self._decoder.detach()
        memory.release_parameters(self._model)

    def kv_layout(self, version: int) -> KvLayout:
        assert self._kv is not None
        return kv_bytes.layout_of(self._kv.data, self._model_key, version)

    def read_kv(self, blocks: Sequence[int], into: memoryview) -> None:
        assert self._kv is not None
        kv_bytes.read_blocks(self._kv.data, blocks, into)

    def write_kv(self, blocks: Sequence[int], heads: tuple[int, int], source: memoryview, first: int) -> bool:
        assert self._kv is not None
        return kv_bytes.write_blocks(self._kv.data, blocks, heads, source, first)

    @torch.inference_mode()
    def run(self, spans: Sequence[Span]) -> list[tuple[Span, int, float]]:
        """Computes the spans; for each that ends its sequence: the sampled token, its log-probability."""
        if self._graphs is not None and all(span.count == 1 and span.samples for span in spans):
            return self._drawn(spans, self._graphs.logits(spans))
        assert self._kv is not None
        step = PagedPass(self._kv, spans)
        hidden = self._decoder.hidden(step.input_ids, step.positions, self._attention(step))
        drawing = [span for span in step.spans if span.samples]
        return self._drawn(drawing, self._decoder.logits(hidden[step.last])) if drawing else []

    def _drawn(self, spans: Sequence[Span], logits: torch.Tensor) -> list[tuple[Span, int, float]]:
        tokens, logprobs = sampling.sample(
            logits,
            [span.sequence.request.sampling for span in spans],
            [span.sequence.position for span in spans],
        )
        return list(zip(spans, tokens, logprobs, strict=True))

    def _attention(self, step: PagedPass) -> Attend:
        if self._steady is None:
            return PagedAttention(step, self._decoder.heads)
        if self._model.device.type == "cuda":
            return FlashAttention(step, self._decoder.heads)
        return InvariantAttention(step, self._scores, self._decoder.heads)
