"""Attention over a block-major paged pool of keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from gyre.cell.engine.kv_home import PoolFile
from gyre.cell.engine.linear import widens
from gyre.rdma import RegionHandle


class Piece(Protocol):
    """Tokens `ids` of a sequence from its place `start` on, and the blocks up to them; `samples` if the next
    one is to be drawn."""

    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def samples(self) -> bool: ...

    @property
    def ids(self) -> list[int]: ...

    @property
    def table(self) -> list[int]: ...


P = TypeVar("P", bound=Piece)


def in_order(spans: Sequence[P]) -> list[P]:
    """As a pass computes them: single tokens first."""
    return sorted(spans, key=lambda span: span.count > 1)


class PagedKv:
    """Keys and values, [blocks + 1, layers, 2, block_tokens, kv_heads, head_dim]: a block is one extent with
    all its layers. The last block stays zero; it pads short sequences in a batch."""

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        file: PoolFile | None = None,
    ) -> None:
        """Where KV is to be read by others of this host it lies in `file`. Raises RegionError."""
        self.layers = layers
        self.block_tokens = block_tokens
        self.padding_block = blocks
        # Zeros, not empty: what is masked is multiplied by 0, and 0 * NaN is NaN.
        shape = (blocks + 1, layers, 2, block_tokens, heads, head_dim)
        self._file: tuple[PoolFile, RegionHandle] | None = None
        if file is None:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        else:
            nbytes = math.prod(shape) * dtype.itemsize
            # One that a rank has left which died: whoever has it mapped keeps it.
            file.shared.free(RegionHandle(backend="shm", name=file.name, nbytes=nbytes))
            region = file.shared.allocate(file.name, nbytes)
            # The mapping ends with the last tensor over it.
            self.data = torch.frombuffer(region.buffer, dtype=dtype).view(shape)
            self._file = file, region.handle
        self.rows = self.data.view(-1, heads, head_dim)
        self.extents = self.data.view(-1, block_tokens * heads * head_dim)
        self.compute_dtype = torch.float32 if widens(dtype, device) else dtype

    @property
    def file(self) -> RegionHandle | None:
        """The region it lies in."""
        return self._file[1] if self._file is not None else None

    def close(self) -> None:
        """Nobody finds it any more."""
        if self._file is not None:
            file, handle = self._file
            file.shared.free(handle)

    def row_indices(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of `rows` for slots (block * block_tokens + offset) [n]: [layers, 2, n]."""
        block = slots.div(self.block_tokens, rounding_mode="floor")
        first = block * (2 * self.layers * self.block_tokens) + slots % self.block_tokens
        return first + self._halves(self.block_tokens, slots.device)[:, :, None]

    def extent_indices(self, blocks: torch.Tensor) -> torch.Tensor:
        """Rows of `extents` for block numbers [n]: [layers, 2 * n], keys before values."""
        indices = blocks.flatten() * (2 * self.layers) + self._halves(1, blocks.device)[:, :, None]
        return indices.flatten(1)

    def write(self, indices: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores [n, kv_heads, head_dim] of a layer at its `row_indices`."""
        self.rows.index_copy_(0, indices[0], keys)
        self.rows.index_copy_(0, indices[1], values)

    def clear_begun(self, spans: Sequence[Piece]) -> None:
        """Before a pass over them: whoever had a block that is only begun now may have left numbers in it
        that are not finite."""
        blocks = [block for span in spans for block in _begun(span, self.block_tokens)]
        if blocks:
            self.data.index_fill_(0, torch.tensor(blocks, device=self.data.device), 0)

    def gather(self, indices: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, kv_heads, tokens, head_dim] of a layer's `extent_indices`, in the type that
        is computed with."""
        heads, head_dim = self.rows.shape[1:]
        found = self.extents.index_select(0, indices).view(2, batch, -1, heads, head_dim).transpose(2, 3)
        found = found.to(self.compute_dtype)
        return found[0], found[1]

    def _halves(self, step: int, device: torch.device) -> torch.Tensor:
        return torch.arange(0, 2 * self.layers * step, step, device=device).view(self.layers, 2)


@dataclass(slots=True, frozen=True)
class Prompt:
    """A span of several tokens, rows [start, stop) of the pass, the first at `position` of its sequence."""

    start: int
    stop: int
    position: int
    blocks: torch.Tensor

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def length_tokens(self) -> int:
        return self.position + self.count


class PagedPass:
    """The tokens of one forward pass, made ready once for all layers: single ones first, in the order of
    their spans, then each longer span."""

    def __init__(self, kv: PagedKv, spans: Sequence[Piece]) -> None:
        self.kv = kv
        device = kv.data.device
        self.spans = spans = in_order(spans)
        self.singles = sum(span.count == 1 for span in spans)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        size = kv.block_tokens
        for span in spans:
            table = span.table
            where = range(span.start, span.start + span.count)
            ids.extend(span.ids)
            positions.extend(where)
            slots.extend([table[at // size] * size + at % size for at in where])
            if span.samples:
                last.append(len(ids) - 1)
        kv.clear_begun(spans)
        packed = torch.tensor((ids, positions, slots), device=device)
        self.input_ids, self.positions = packed[0], packed[1]
        self.last = torch.tensor(last, dtype=torch.long, device=device)
        self._write = kv.row_indices(packed[2])
        self.prompts = [self._prompt(index) for index in range(self.singles, len(spans))]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.kv.write(self._write[layer], keys, values)

    def tables(self, multiple: int = 1) -> torch.Tensor:
        """Blocks that the single tokens read [singles, width], padded to the longest, and to a multiple."""
        size = self.kv.block_tokens
        spans = self.spans[: self.singles]
        used = [span.start // size + 1 for span in spans]
        width = -(-max(used) // multiple) * multiple
        padding = self.kv.padding_block
        tables = [
            span.table[:count] + [padding] * (width - count) for span, count in zip(spans, used, strict=True)
        ]
        return torch.tensor(tables, device=self.kv.data.device)

    def _prompt(self, index: int) -> Prompt:
        span = self.spans[index]
        start = self.singles + sum(other.count for other in self.spans[self.singles : index])
        blocks = span.table[: (span.start + span.count - 1) // self.kv.block_tokens + 1]
        table = torch.tensor(blocks, device=self.kv.data.device)
        return Prompt(start, start + span.count, span.start, table)


def _begun(span: Piece, size: int) -> list[int]:
    """The block that it begins and does not fill, if there is one."""
    end = span.start + span.count
    return [span.table[end // size]] if end % size and end - end % size >= span.start else []


class BatchAttention:
    """Attention of one token of each of several sequences, over the blocks `tables` [batch, width] up to its
    position."""

    def __init__(self, kv: PagedKv, tables: torch.Tensor, positions: torch.Tensor) -> None:
        self._kv = kv
        self._read = kv.extent_indices(tables)
        keys = torch.arange(tables.shape[1] * kv.block_tokens, device=positions.device)
        mask = torch.zeros((len(tables), len(keys)), dtype=kv.compute_dtype, device=positions.device)
        self._mask = mask.masked_fill_(keys > positions[:, None], float("-inf"))[:, None, None]

    def __call__(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """[batch, heads, head_dim]."""
        keys, values = self._kv.gather(self._read[layer], len(query))
        return attend_grouped(query[:, None], keys, values, self._mask)[:, 0]


def attend_grouped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Of queries [batch, tokens, heads, head_dim] over [batch, kv_heads, keys, head_dim], with a mask over
    [tokens * group, keys]: query heads that share a key head stand beside each other as its queries, so that
    keys are read once for all."""
    batch, tokens, heads, head_dim = query.shape
    grouped = query.reshape(batch, tokens, keys.shape[1], -1, head_dim).transpose(1, 2)
    grouped = grouped.reshape(batch, keys.shape[1], -1, head_dim).to(keys.dtype)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    out = out.view(batch, keys.shape[1], tokens, -1, head_dim).transpose(1, 2)
    return out.reshape(batch, tokens, heads, head_dim).to(query.dtype)


class PagedAttention:
    """Attends in a pass by SDPA: the single tokens as one batch padded to the longest, each longer span by
    itself. A longer span without a prefix reads its own keys, else all of them from the pool."""

    def __init__(self, step: PagedPass, heads: int) -> None:
        self._step = step
        self._group = heads // step.kv.data.shape[4]
        if step.singles:
            self._batch = BatchAttention(step.kv, step.tables(), step.positions[: step.singles])
        self._prompts = [(prompt, self._prefix(prompt)) for prompt in step.prompts]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Stores the pass's keys and values, and answers [n, heads, head_dim]."""
        self._step.write(layer, key, value)
        parts: list[torch.Tensor] = []
        if self._step.singles:
            parts.append(self._batch(layer, query[: self._step.singles]))
        for prompt, prefix in self._prompts:
            rows = slice(prompt.start, prompt.stop)
            if prefix is None:
                parts.append(self._own(query[rows], key[rows], value[rows]))
            else:
                keys, values = self._step.kv.gather(prefix[0][layer], 1)
                length = prompt.length_tokens
                parts.append(
                    attend_grouped(query[None, rows], keys[:, :, :length], values[:, :, :length], prefix[1])[
                        0
                    ]
                )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prefix(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The extents to read, and the mask."""
        if not prompt.position:
            return None
        kv = self._step.kv
        mask = torch.full(
            (prompt.count, prompt.length_tokens),
            float("-inf"),
            dtype=kv.compute_dtype,
            device=kv.data.device,
        ).triu_(prompt.position + 1)
        return kv.extent_indices(prompt.blocks), mask.repeat_interleave(self._group, dim=0)

    def _own(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        dtype = self._step.kv.compute_dtype
        q, k, v = (part.transpose(0, 1)[None].to(dtype) for part in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self._group > 1)
        return out[0].transpose(0, 1).to(query.dtype)
