"""Decode passes on a GPU as CUDA graphs: what a pass launches is recorded once, then replayed in one call."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gyre.cell.engine.decoder import Decoder
from gyre.cell.engine.paged import BatchAttention, PagedKv, Piece

_LEAST_KEYS = 64


@dataclass(slots=True, frozen=True)
class _Graph:
    """A recorded `decode`: it reads `inputs` and writes `logits` where they are."""

    inputs: torch.Tensor
    logits: torch.Tensor
    graph: torch.cuda.CUDAGraph


class DecodeGraphs:
    """Of a decoder over a pool, one for each size that is asked for: the number of rows, and of the blocks
    that each reads, is rounded up, so that there are few. Good while weights and pool stay where they are."""

    def __init__(self, decoder: Decoder, kv: PagedKv) -> None:
        self._decoder = decoder
        self._kv = kv
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        # Of the pass before; in most passes no sequence begins a block, and its tables hold still.
        self._packed = torch.empty(0, dtype=torch.long)
        self._packed_for: tuple[tuple[int, int], list[list[int]]] | None = None

    def logits(self, spans: Sequence[Piece]) -> torch.Tensor:
        """[spans, vocab], valid until the next call. Each span is the one last token of its sequence."""
        size = self._kv.block_tokens
        tables = [span.table[: span.start // size + 1] for span in spans]
        shape = (padded_rows(len(spans)), padded_blocks(max(map(len, tables)), size))
        self._kv.clear_begun(spans)
        if (shape, tables) != self._packed_for:
            self._packed = pack(spans, self._kv, *shape).pin_memory()
            self._packed_for = (shape, tables)
        else:
            pack_tokens(spans, size, self._packed)
        found = self._graphs.get(shape)
        if found is None:
            found = self._graphs[shape] = self._record(self._packed)
        found.inputs.copy_(self._packed, non_blocking=True)
        found.graph.replay()
        return found.logits[: len(spans)]

    def _record(self, host: torch.Tensor) -> _Graph:
        inputs = host.to(self._kv.data.device)
        # The first run is not recorded: libraries take memory for themselves in it.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            like = decode(self._decoder, self._kv, inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with (
            _uncollected(),
            torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
        ):
            logits = self._output(like).copy_(decode(self._decoder, self._kv, inputs))
        return _Graph(inputs, logits, graph)

    def _output(self, like: torch.Tensor) -> torch.Tensor:
        """One for all graphs of so many rows: logits are large, and read before the next pass."""
        rows = len(like)
        if rows not in self._outputs:
            self._outputs[rows] = torch.empty_like(like)
        return self._outputs[rows]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Garbage stays: a graph of an earlier life that is freed while one is recorded breaks the recording."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def decode(decoder: Decoder, kv: PagedKv, inputs: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocab] of one token a row. `inputs` [3 + blocks, rows]: token, position, slot in the
    pool, and the blocks up to it."""
    ids, positions, slots = inputs[0], inputs[1], inputs[2]
    rows = kv.row_indices(slots)
    batch = BatchAttention(kv, inputs[3:].t(), positions)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        kv.write(rows[layer], key, value)
        return batch(layer, query)

    return decoder.logits(decoder.hidden(ids, positions, attend))


def padded_rows(rows: int) -> int:
    """The next of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128 ..."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 32 and rows <= power * 3 // 4 else power


def padded_blocks(blocks: int, block_tokens: int) -> int:
    """The next power of two, or one and a half of one, of 64 tokens at least: what is padded is read too."""
    least = max(blocks, -(-_LEAST_KEYS // block_tokens))
    power = 1 << (least - 1).bit_length()
    return power * 3 // 4 if power >= 4 and least <= power * 3 // 4 else power


def pack(spans: Sequence[Piece], kv: PagedKv, rows: int, blocks: int) -> torch.Tensor:
    """Inputs of `decode`, on the host. Rows that pad do what the first one does: they write the same numbers
    to the same place, and no other place is touched."""
    size = kv.block_tokens
    lines = []
    for span in spans:
        table = span.table[: span.start // size + 1]
        lines.append([0, 0, 0, *table, *([kv.padding_block] * (blocks - len(table)))])
    lines.extend([lines[0]] * (rows - len(lines)))
    packed = torch.tensor(lines).t().contiguous()
    pack_tokens(spans, size, packed)
    return packed


def pack_tokens(spans: Sequence[Piece], block_tokens: int, packed: torch.Tensor) -> None:
    """Writes tokens, positions and slots for sequences whose tables stand in `packed` already."""
    lines: list[tuple[int, int, int]] = []
    for span in spans:
        at = span.start
        block = span.table[at // block_tokens]
        lines.append((span.ids[0], at, block * block_tokens + at % block_tokens))
    lines.extend([lines[0]] * (packed.shape[1] - len(lines)))
    packed[:3] = torch.tensor(lines).t()
