"""Attention of a transformers model over a block-major paged pool of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from gyre.cell.engine.scheduler import Span

ATTENTION = "gyre_paged"


def check_model(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose attention cannot be paged as it is here."""
    config = model.config
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not take transformers' attention functions: use a Llama or Qwen shape")
    windowed = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or (windowed,)) - {"full_attention"}
    if kinds:
        raise ValueError(f"{name} has {sorted(kinds)} layers: the native engine runs full attention only")
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError(f"{name} caps its attention logits, which the native engine does not")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        # There the angle of a position depends on the longest sequence of the batch.
        raise ValueError(f"{name} has {rope} rotary positions, which depend on the batch")


@contextmanager
def paged_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it `model` attends over the paged pool; after it as before, for training."""
    before = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = before


class PagedKv:
    """Keys and values, [blocks + 1, layers, 2, block_tokens, kv_heads, head_dim]: a block is one extent with
    all its layers. The last block stays zero; it pads short sequences in a batch."""

    def __init__(
        self,
        config: PretrainedConfig,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.layers: int = config.num_hidden_layers
        self.block_tokens = block_tokens
        self.padding_block = blocks
        # Zeros, not empty: what is masked is multiplied by 0, and 0 * NaN is NaN.
        self.data = torch.zeros(
            (blocks + 1, self.layers, 2, block_tokens, heads, head_dim), dtype=dtype, device=device
        )
        self.rows = self.data.view(-1, heads, head_dim)
        self.extents = self.data.view(-1, block_tokens * heads * head_dim)

    def row_indices(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of `rows` for slots (block * block_tokens + offset) [n]: [layers, 2, n]."""
        block = slots.div(self.block_tokens, rounding_mode="floor")
        first = block * (2 * self.layers * self.block_tokens) + slots % self.block_tokens
        return first + self._halves(self.block_tokens, slots.device)[:, :, None]

    def extent_indices(self, blocks: torch.Tensor) -> torch.Tensor:
        """Rows of `extents` for block numbers [n]: [layers, 2 * n], keys before values."""
        indices = blocks.flatten() * (2 * self.layers) + self._halves(1, blocks.device)[:, :, None]
        return indices.flatten(1)

    def gather(self, indices: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, kv_heads, tokens, head_dim] of a layer's `extent_indices`."""
        heads, head_dim = self.rows.shape[1:]
        found = self.extents.index_select(0, indices).view(2, batch, -1, heads, head_dim).transpose(2, 3)
        return found[0], found[1]

    def _halves(self, step: int, device: torch.device) -> torch.Tensor:
        return torch.arange(0, 2 * self.layers * step, step, device=device).view(self.layers, 2)


@dataclass(slots=True, frozen=True)
class _Prompt:
    """A span of several tokens, rows [start, stop) of the pass. With a prefix it reads all its keys from the
    pool, `extents` [layers, 2 * blocks], else its own are all."""

    start: int
    stop: int
    length_tokens: int
    extents: torch.Tensor | None
    mask: torch.Tensor | None


class PagedPass:
    """What one forward pass needs at each layer, made once: the spans' tokens side by side as one row, single
    ones first (they attend as one padded batch), then each longer span."""

    def __init__(self, kv: PagedKv, spans: Sequence[Span]) -> None:
        self._kv = kv
        device = kv.data.device
        spans = sorted(spans, key=lambda span: span.count > 1)
        self.spans = spans
        self._singles = sum(span.count == 1 for span in spans)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        size = kv.block_tokens
        for span in spans:
            table = span.sequence.table
            where = range(span.start, span.start + span.count)
            ids.extend(span.sequence.tokens[span.start : span.start + span.count])
            positions.extend(where)
            slots.extend(table[at // size] * size + at % size for at in where)
            if span.samples:
                last.append(len(ids) - 1)
        packed = torch.tensor((ids, positions, slots), device=device)
        self.input_ids = packed[:1]
        self.position_ids = packed[1:2]
        self.last = torch.tensor(last, dtype=torch.long, device=device)
        self._write = kv.row_indices(packed[2])
        self._prompts = self._make_prompts(spans[self._singles :])
        if self._singles:
            self._read, self._mask = self._make_batch(spans[: self._singles])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Writes keys and values [1, kv_heads, tokens, head_dim] of the pass and answers
        [1, tokens, heads, head_dim]."""
        keys, values = self._write[layer]
        self._kv.rows.index_copy_(0, keys, key[0].transpose(0, 1))
        self._kv.rows.index_copy_(0, values, value[0].transpose(0, 1))
        parts: list[torch.Tensor] = []
        if self._singles:
            parts.append(self._attend_batch(layer, query[0, :, : self._singles], scaling))
        parts.extend(self._attend_prompt(layer, p, query, key, value, scaling) for p in self._prompts)
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _make_batch(self, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self._kv
        size = kv.block_tokens
        used = [span.start // size + 1 for span in spans]
        width = max(used)
        tables = [
            span.sequence.table[:count] + [kv.padding_block] * (width - count)
            for span, count in zip(spans, used, strict=True)
        ]
        device = kv.data.device
        positions = self.position_ids[0, : len(spans), None]
        mask = torch.zeros((len(spans), width * size), dtype=kv.data.dtype, device=device)
        mask.masked_fill_(torch.arange(width * size, device=device) > positions, float("-inf"))
        return kv.extent_indices(torch.tensor(tables, device=device)), mask[:, None, None]

    def _make_prompts(self, spans: Sequence[Span]) -> list[_Prompt]:
        kv = self._kv
        prompts: list[_Prompt] = []
        at = self._singles
        for span in spans:
            extents = mask = None
            length = span.start + span.count
            if span.start:
                blocks = span.sequence.table[: (length - 1) // kv.block_tokens + 1]
                extents = kv.extent_indices(torch.tensor(blocks, device=kv.data.device))
                mask = torch.full(
                    (span.count, length), float("-inf"), dtype=kv.data.dtype, device=kv.data.device
                ).triu_(span.start + 1)
            prompts.append(_Prompt(at, at + span.count, length, extents, mask))
            at += span.count
        return prompts

    def _attend_batch(self, layer: int, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        keys, values = self._kv.gather(self._read[layer], self._singles)
        heads, tokens, head_dim = query.shape
        # Query heads that share a key head stand in the place of query tokens: keys are read once for all.
        grouped = query.transpose(0, 1).reshape(tokens, keys.shape[1], -1, head_dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scaling)
        return out.reshape(tokens, heads, head_dim)

    def _attend_prompt(
        self,
        layer: int,
        prompt: _Prompt,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        rows = slice(prompt.start, prompt.stop)
        if prompt.extents is None:
            keys, values = key[:, :, rows], value[:, :, rows]
        else:
            keys, values = self._kv.gather(prompt.extents[layer], 1)
            keys, values = keys[:, :, : prompt.length_tokens], values[:, :, : prompt.length_tokens]
        out = F.scaled_dot_product_attention(
            query[:, :, rows],
            keys,
            values,
            attn_mask=prompt.mask,
            is_causal=prompt.mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    gyre_pass: PagedPass,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer: Any = module.layer_idx
    return gyre_pass.attend(layer, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)
