"""Logits that do not depend on what else is in a pass, nor on how a sequence was cut into passes.

A product of matrices adds up each row in an order that may depend on how many rows there are, but not on the
numbers. So a few counts of rows are tried out once with random numbers: those whose rows come out bit for bit
the same add up alike, and rows are padded to, or cut into, such counts alone. Attention goes over tiles of a
fixed number of keys, from first to last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F

from gyre.cell.engine.linear import Widener, weight_tiles, widens
from gyre.cell.engine.paged import PagedKv, PagedPass, Prompt

ROWS = (4, 8, 16, 32, 64, 128, 256, 512)
_WHOLE_FROM = 64
_KEYS = 128
_QUERY_ROWS = 256
_BATCHES = (1, 2, 5, 16)
# torch cuts what has more elements among threads, at places that depend on their number.
_GRAIN = 32768


class NotInvariant(RuntimeError):
    """This machine adds up in ways that cannot be held fixed."""


def check_invariant(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError for what the mode is not made for."""
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"batch_invariant on a GPU wants bfloat16: flash attention does not take {dtype}")


class RowCounts:
    """The counts of rows that are computed alike; at first all that may be."""

    def __init__(self, counts: Iterable[int] = ROWS) -> None:
        self.counts = tuple(counts)

    def keep(self, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, anchor: int) -> None:
        """Drops the counts under which rows of `x` come out otherwise than among `anchor` rows."""
        if not torch.equal(product(x[1 : anchor + 1].clone())[:-1], product(x[:anchor])[1:]):
            raise NotInvariant("rows of a product depend on their place in it")
        want = torch.cat([product(x[at : at + anchor]) for at in range(0, len(x), anchor)])
        self.counts = tuple(
            count
            for count in self.counts
            if count == anchor
            or all(
                torch.equal(product(x[at : at + count]), want[at : at + count]) for at in (0, len(x) - count)
            )
        )

    def cuts(self, rows: int) -> Iterator[tuple[int, int]]:
        """Pieces [start, stop) that cover `rows`, the last perhaps more: full ones while many are left."""
        at = 0
        while at < rows:
            left = rows - at
            full = [count for count in self.counts if count <= left]
            roomy = [count for count in self.counts if count >= left]
            count = full[-1] if full and (left >= _WHOLE_FROM or not roomy) else roomy[0]
            yield at, at + count
            at += count


class InvariantLinear:
    """A `Linear` whose rows do not depend on each other. `check` comes first."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = RowCounts()
        self._widened = Widener() if widens(dtype, device) else None
        self._device = device
        # Where reading the weights takes longest, a full tile costs little more than a row.
        self._anchor = 128 if device.type == "cuda" else 16
        self._checked: set[tuple[int, ...]] = set()

    def check(self, weights: Iterable[torch.Tensor]) -> None:
        """Finds the counts of rows that agree for weights of these shapes. Raises NotInvariant."""
        for weight in weights:
            for tile in self._tiles(weight):
                if tuple(tile.shape) not in self._checked:
                    self._checked.add(tuple(tile.shape))
                    self._check(tile)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        count = len(x)
        cuts = list(self.rows.cuts(count))
        padding = cuts[-1][1] - count
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        wide = x if self._widened is None else x.float()
        parts: list[torch.Tensor] = []
        for tile in self._tiles(weight):
            right = (tile if self._widened is None else self._widened(tile)).t()
            rows = [torch.mm(wide[start:stop], right) for start, stop in cuts]
            parts.append(rows[0] if len(rows) == 1 else torch.cat(rows))
        out = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:count]
        if bias is not None:
            out = out + bias
        return out.to(weight.dtype)

    def _tiles(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return weight_tiles(weight) if self._device.type == "cpu" else [weight]

    def _check(self, tile: torch.Tensor) -> None:
        dtype = tile.dtype if self._widened is None else torch.float32
        numbers = torch.Generator(self._device).manual_seed(0)
        right = torch.randn(tile.shape, generator=numbers, dtype=dtype, device=self._device).t()
        x = torch.randn((ROWS[-1], tile.shape[1]), generator=numbers, dtype=dtype, device=self._device)
        self.rows.keep(lambda rows: torch.mm(rows, right), x, self._anchor)


def steady_silu(x: torch.Tensor) -> torch.Tensor:
    """Of rows [n, width], few enough at a time that no row is cut among threads: where one is cut, the last
    numbers before the cut are computed by other instructions."""
    rows = max((_GRAIN - 1) // x.shape[-1], 1)
    if len(x) <= rows or x.device.type != "cpu":
        return F.silu(x)
    return torch.cat([F.silu(x[at : at + rows]) for at in range(0, len(x), rows)])


class InvariantScores:
    """Attention of rows of queries over tiles of keys, in float32. `check` comes first."""

    def __init__(self, head_dim: int, block_tokens: int) -> None:
        self.rows = RowCounts(count for count in ROWS if count <= _QUERY_ROWS)
        self.tile_blocks = -(-_KEYS // block_tokens)
        self.tile_tokens = self.tile_blocks * block_tokens
        self._head_dim = head_dim
        self._checked = False

    def check(self) -> None:
        """Finds the counts of rows that agree. Raises NotInvariant."""
        if self._checked:
            return
        numbers = torch.Generator().manual_seed(0)
        keys = torch.randn((_BATCHES[-1], self.tile_tokens, self._head_dim), generator=numbers)
        for right in (keys.transpose(1, 2), keys):
            x = torch.randn((len(keys), _QUERY_ROWS, right.shape[1]), generator=numbers)
            self.rows.keep(lambda rows, right=right: torch.bmm(rows[None], right[:1])[0], x[0], 16)  # type: ignore[misc]
            for count in self.rows.counts:
                alone = torch.cat([torch.bmm(x[i : i + 1, :count], right[i : i + 1]) for i in range(len(x))])
                for batch in _BATCHES:
                    if not torch.equal(torch.bmm(x[:batch, :count], right[:batch]), alone[:batch]):
                        raise NotInvariant("products depend on how many are computed together")
        _check_exponents()
        self._checked = True

    def padded(self, rows: int) -> int:
        """The least agreeing count of at least `rows`."""
        return next(count for count in self.rows.counts if count >= rows)

    @property
    def most_rows(self) -> int:
        return self.rows.counts[-1]

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Queries [batch, kv_heads, rows, head_dim] over keys and values [batch, kv_heads, tiles,
        tile_tokens, head_dim] but those `hidden` [batch, 1, tiles, rows, tile_tokens]."""
        scores = torch.matmul(query[:, :, None], keys.transpose(-1, -2)).mul_(self._head_dim**-0.5)
        scores.masked_fill_(hidden, float("-inf"))
        # Exact in any order; a tile that is hidden wholly adds exact zeros.
        weights = scores.sub_(scores.amax(dim=(2, 4), keepdim=True)).exp_()
        sums = weights.sum(-1)
        parts = torch.matmul(weights, values)
        total, out = sums[:, :, 0], parts[:, :, 0]
        for tile in range(1, keys.shape[2]):
            total = total + sums[:, :, tile]
            out = out + parts[:, :, tile]
        return out / total[..., None]


def _check_exponents() -> None:
    """A number has one exponential, wherever it stands."""
    x = torch.randn(3 * _GRAIN, generator=torch.Generator().manual_seed(0))
    want = x.exp()
    for start, stop in ((0, 5), (3, 130), (1, _GRAIN + 9), (7, len(x) - 2)):
        if not torch.equal(x[start:stop].clone().exp_(), want[start:stop]):
            raise NotInvariant("an exponential depends on its place among others")


class InvariantAttention:
    """Attends in a pass; all keys, a prompt's own too, are read from the pool."""

    def __init__(self, step: PagedPass, scores: InvariantScores, heads: int) -> None:
        self._step = step
        self._scores = scores
        kv = step.kv
        self._kv_heads = kv.data.shape[4]
        self._group = heads // self._kv_heads
        if step.singles:
            tables = step.tables(scores.tile_blocks)
            self._read = kv.extent_indices(tables)
            rows = scores.padded(self._group)
            positions = step.positions[: step.singles, None].expand(-1, rows)
            self._hidden = self._mask(positions, tables.shape[1])
        self._prompts = [(prompt, kv.extent_indices(self._table(prompt))) for prompt in step.prompts]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Stores the pass's keys and values, and answers [n, heads, head_dim]."""
        step = self._step
        step.write(layer, key, value)
        parts: list[torch.Tensor] = []
        if step.singles:
            keys, values = self._tiles(self._read[layer], step.singles)
            parts.append(self._attend(query[: step.singles, None], keys, values, self._hidden)[:, 0])
        for prompt, extents in self._prompts:
            keys, values = self._tiles(extents[layer], 1)
            parts.append(self._prompt(prompt, query[prompt.start : prompt.stop], keys, values))
        return torch.cat(parts).to(query.dtype)

    def _table(self, prompt: Prompt) -> torch.Tensor:
        padding = -len(prompt.blocks) % self._scores.tile_blocks
        return F.pad(prompt.blocks, (0, padding), value=self._step.kv.padding_block)

    def _mask(self, positions: torch.Tensor, blocks: int) -> torch.Tensor:
        """Keys after the positions [batch, rows]: [batch, 1, tiles, rows, tile_tokens]."""
        tile = self._scores.tile_tokens
        keys = torch.arange(blocks * self._step.kv.block_tokens, device=positions.device).view(-1, 1, tile)
        return (keys > positions[:, None, :, None])[:, None]

    def _tiles(self, extents: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv: PagedKv = self._step.kv
        heads, head_dim = kv.rows.shape[1:]
        found = kv.extents.index_select(0, extents)
        found = found.view(2, batch, -1, self._scores.tile_tokens, heads, head_dim).permute(0, 1, 4, 2, 3, 5)
        found = found.to(torch.float32, memory_format=torch.contiguous_format)
        return found[0], found[1]

    def _prompt(
        self, prompt: Prompt, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """In pieces of queries, each over the tiles up to its last one."""
        tile = self._scores.tile_tokens
        most = max(self._scores.most_rows // self._group, 1)
        parts: list[torch.Tensor] = []
        for at in range(0, prompt.count, most):
            piece = query[at : at + most]
            first = prompt.position + at
            tiles = (first + len(piece) - 1) // tile + 1
            positions = torch.arange(first, first + len(piece), device=query.device)
            positions = positions.repeat_interleave(self._group)
            rows = self._scores.padded(len(positions))
            # Rows that pad see the first key, so that they are finite.
            positions = F.pad(positions, (0, rows - len(positions)))[None]
            hidden = self._mask(positions, tiles * self._scores.tile_blocks)
            parts.append(self._attend(piece[None], keys[:, :, :tiles], values[:, :, :tiles], hidden)[0])
        return torch.cat(parts)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Of queries [batch, tokens, heads, head_dim]; heads that share keys are rows beside each other."""
        batch, tokens, heads, head_dim = query.shape
        grouped = query.view(batch, tokens, self._kv_heads, self._group, head_dim).transpose(1, 2)
        grouped = grouped.reshape(batch, self._kv_heads, tokens * self._group, head_dim).float()
        rows = F.pad(grouped, (0, 0, 0, hidden.shape[3] - grouped.shape[2]))
        out = self._scores(rows, keys, values, hidden)[:, :, : tokens * self._group]
        out = out.view(batch, self._kv_heads, tokens, self._group, head_dim).transpose(1, 2)
        return out.reshape(batch, tokens, heads, head_dim)
