"""Batch-invariant attention on a GPU: torch's flash attention over sequences of many lengths at once.

One block of threads computes a tile of queries over all tiles of keys, in one order, counted from the first
key on. Keys that a query does not see add exact zeros, so a row is the same in every tile. Only in passes of
one query per sequence are the keys of a query cut among several blocks of threads, which adds up otherwise.
So there it is said that a sequence could have two.
"""

from __future__ import annotations

import torch
from torch.nn.attention.varlen import varlen_attn

from gyre.cell.engine.paged import PagedPass


class FlashAttention:
    """Attends in a pass; all keys, a prompt's own too, are read from the pool."""

    def __init__(self, step: PagedPass, heads: int) -> None:
        self._step = step
        kv = step.kv
        device = kv.data.device
        self._group = heads // kv.data.shape[4]
        counts = [span.count for span in step.spans]
        lengths = [span.start + span.count for span in step.spans]
        self._most_queries, self._most_keys = max(2, *counts), max(lengths)
        starts = torch.tensor(([0, *counts], [0, *lengths]), device=device)
        self._query_starts, self._key_starts = starts.cumsum(-1).to(torch.int32)
        offsets = torch.arange(kv.block_tokens, device=device)
        slots: list[torch.Tensor] = []
        for span, length in zip(step.spans, lengths, strict=True):
            blocks = torch.tensor(span.table, device=device)[:, None]
            slots.append((blocks * kv.block_tokens + offsets).flatten()[:length])
        self._read = kv.row_indices(torch.cat(slots))

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Stores the pass's keys and values, and answers [n, heads, head_dim]."""
        self._step.write(layer, key, value)
        rows = self._step.kv.rows
        keys, values = (rows[index].repeat_interleave(self._group, dim=1) for index in self._read[layer])
        out = varlen_attn(
            query.contiguous(),
            keys,
            values,
            self._query_starts,
            self._key_starts,
            self._most_queries,
            self._most_keys,
            window_size=(-1, 0),
        )
        assert isinstance(out, torch.Tensor)
        return out
