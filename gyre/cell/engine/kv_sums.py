"""Sums of blocks of KV in host memory, each taken as it arrives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gyre.rdma import Look


class BlockSums:
    """Of `blocks` of `nbytes` each in `memory`, by the `look` of a read that fills them: see `KvStore.sums`.
    Numpy, not torch, whose threads would take the cores from those that copy."""

    def __init__(self, memory: memoryview, nbytes: int, blocks: Sequence[int]) -> None:
        words = np.dtype(np.int32 if nbytes % 8 else np.int64)
        whole = len(memory) // nbytes * nbytes
        self._words = np.frombuffer(memory[:whole], words).reshape(-1, nbytes // words.itemsize)
        self._places = {block * nbytes: place for place, block in enumerate(blocks)}
        self._sums = np.zeros(len(blocks), np.int64)
        self._nbytes = nbytes

    @property
    def look(self) -> Look:
        return Look(self._nbytes, self._add_up)

    def taken(self) -> bytes:
        """In the order of the blocks."""
        return self._sums.tobytes()

    def _add_up(self, start: int) -> None:
        words = self._words[start // self._nbytes]
        self._sums[self._places[start]] = np.add.reduce(words, dtype=np.int64)
