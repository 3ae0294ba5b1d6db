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
from gyre.cell.engine.handover import KvMemory
from gyre.cell.engine.invariant import (
    InvariantAttention,
    InvariantLinear,
    InvariantScores,
    check_invariant,
    steady_silu,
)
from gyre.cell.engine.kv_home import PoolFile
from gyre.cell.engine.linear import pick_linear
from gyre.cell.engine.paged import PagedAttention, PagedKv, PagedPass, Piece, in_order
from gyre.cell.engine.scheduler import Span
from gyre.cell.engine.share import ALONE, Share
from gyre.cell.engine.stage import Stage
from gyre.cell.engine.sums import Sum
from gyre.cell.page_lock import page_lock
from gyre.rdma import PageLock, RegionHandle


class Runner:
    """A model, or a rank's share of it, and its KV pool. All methods belong to the device thread. With
    `batch_invariant` its numbers do not depend on how sequences are batched and cut into passes. What has a
    share is given `sum`, over all ranks, before the first pass."""

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: int,
        block_tokens: int,
        window_tokens: int,
        batch_invariant: bool = False,
        share: Share = ALONE,
        file: PoolFile | None = None,
    ) -> None:
        self._share = share
        self._whole_config = model.config
        self._model = share.model(model)
        memory_of_share = self._model is not model
        dtype, device = model.dtype, model.device
        if batch_invariant:
            check_invariant(dtype, device)
        self._steady = InvariantLinear(dtype, device) if batch_invariant else None
        self.sum: Sum | None = None
        self._decoder = Decoder(
            self._model,
            self._steady or pick_linear(dtype, device),
            window_tokens,
            steady_silu if batch_invariant else F.silu,
            self if share.ranks > 1 else None,
            share.vocab(model.config) if share.ranks > 1 and _tied(self._model) else None,
        )
        self._scores = InvariantScores(self._decoder.head_dim, block_tokens)
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._kv: PagedKv | None = None
        self._file = file
        self._stage: Stage | None = None
        self._graphs: DecodeGraphs | None = None
        self._model_key = kv_bytes.model_key(model.config)
        if memory_of_share:
            memory.release_parameters(self._model)

    @property
    def vocab(self) -> int:
        return int(self._model.config.vocab_size)

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

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
            self._share.fill(self._model, self._whole_config, tensors)

    def take_kv(self, slot_bytes: int | None = None) -> None:
        """`slot_bytes`: those of the leading rank's stage, 0 where it has none."""
        if self._file is not None and slot_bytes is not None:
            self._file = self._file._replace(slot_bytes=slot_bytes)
        file = self._file
        staged = file is not None and file.slot_bytes > 0
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
                None if staged or self._model.device.type != "cpu" else file,
            )
            if file is not None and staged and self._stage is None:
                block = self._kv.data[0]
                most = max(file.slot_bytes // block.nbytes, 1)
                self._stage = Stage(file, block, min(most, self._blocks))
            if self._steady is None and self._model.device.type == "cuda":
                self._graphs = DecodeGraphs(decoder, self._kv)

    def release_kv(self) -> None:
        self._graphs = None
        if self._kv is not None:
            self._kv.close()
        self._kv = None

    def release_weights(self) -> None:
        self._decoder.detach()
        memory.release_parameters(self._model)

    def kv_layout(self, version: int) -> KvLayout:
        _, heads = self.heads_of(ALONE)
        return kv_bytes.layout_of(self.kv.data, self._model_key, version, heads)

    @property
    def kv(self) -> PagedKv:
        """While it is there."""
        assert self._kv is not None
        return self._kv

    def close(self) -> None:
        """After `release_kv`, for good."""
        if self._stage is not None:
            self._stage.close()
            self._stage = None

    @property
    def file(self) -> RegionHandle | None:
        """The region that its pool is, or its stage, if one is."""
        return self.kv.file if self._stage is None else self._stage.handle

    @property
    def slot_blocks(self) -> int:
        return 0 if self._stage is None else self._stage.slot_blocks

    def fill_slot(self, blocks: Sequence[int], slot: int) -> None:
        assert self._stage is not None
        self._stage.fill(slot, self.kv.data, blocks)

    def read_kv(self, rank: int, blocks: Sequence[int], target: memoryview) -> None:
        kv_bytes.read_blocks(self.kv.data, blocks, target)

    def take_slot(self, blocks: Sequence[int], heads: tuple[int, int], slot: int, nbytes: int) -> bytes:
        """As `write_kv`, from a slot of its own stage."""
        assert self._stage is not None
        return self.write_kv(0, blocks, heads, self._stage.slot(slot)[:nbytes])

    @property
    def page_lock(self) -> PageLock | None:
        return page_lock(self._model.device)

    def kv_memory(self) -> tuple[KvMemory, ...]:
        kv = self.kv
        if self._stage is not None:
            return (KvMemory(self.heads_of(self._share), self._stage.memory, self._stage.handle),)
        memory: object = kv.data
        if kv.data.device.type == "cpu":
            memory = kv.data.view(torch.uint8).numpy()
        return (KvMemory(self.heads_of(self._share), memory, kv.file),)

    def settle(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def sums(self, rank: int, blocks: Sequence[int]) -> bytes:
        return kv_bytes.sums(self.kv.data, blocks)

    def finite_sums(self, rank: int, blocks: Sequence[int]) -> bytes | None:
        return kv_bytes.finite_sums(self.kv.data, blocks)

    def write_kv(self, rank: int, blocks: Sequence[int], heads: tuple[int, int], source: memoryview) -> bytes:
        """Those of its heads that this rank holds."""
        return kv_bytes.write_blocks(self.kv.data, blocks, self.heads_of(self._share), heads, source)

    def heads_of(self, share: Share) -> tuple[int, int]:
        """The KV heads of a rank."""
        return share.kv_heads(self._whole_config)

    @torch.inference_mode()
    def follow(self, pieces: Sequence[Piece]) -> None:
        """This rank's share of a pass that rank 0 runs."""
        if self._graphs is not None and _decodes(pieces):
            self._graphs.logits(pieces)
        else:
            last = self._hidden(pieces)
            if len(last):
                self._decoder.logits(last)

    @torch.inference_mode()
    def run(self, spans: Sequence[Span]) -> list[tuple[Span, int, float]]:
        """Computes the spans; for each that ends its sequence: the sampled token, its log-probability."""
        if self._graphs is not None and _decodes(spans):
            return self._drawn(spans, self._graphs.logits(spans))
        last = self._hidden(spans)
        drawing = [span for span in in_order(spans) if span.samples]
        return self._drawn(drawing, self._decoder.logits(last)) if drawing else []

    def _hidden(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Of the last token of each piece that samples."""
        assert self._kv is not None
        step = PagedPass(self._kv, pieces)
        return self._decoder.hidden(step.input_ids, step.positions, self._attention(step))[step.last]

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks have."""
        assert self.sum is not None, "the ranks have not met"
        return self.sum(x)

    def joined(self, logits: torch.Tensor) -> torch.Tensor:
        """At rank 0 those of all ranks side by side."""
        assert self.sum is not None, "the ranks have not met"
        spans = [
            Share(rank, self._share.ranks).vocab(self._whole_config) for rank in range(self._share.ranks)
        ]
        return self.sum.side_by_side(logits, [last - first for first, last in spans])

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


def _decodes(pieces: Sequence[Piece]) -> bool:
    return all(piece.count == 1 and piece.samples for piece in pieces)


def _tied(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight
