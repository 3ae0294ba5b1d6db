"""How a group is cut into micro-steps.

In lexicographic order of their tokens the trajectories of a group are the leaves of one prefix tree in DFS
order, whichever executions they belong to: each shares with its neighbour the longest prefix that it shares
with any before it. A micro-step is an interval of that order. Its size is that of its rows, which is what a
cell computes; the cuts are where they leave the fewest tokens in the trees that the intervals span, a shared
prefix counted once in each.

The micro-steps come longest first: cells claim them in that order, which is longest-processing-time-first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gyre.loss.microstep import Trajectory

Int64s = npt.NDArray[np.int64]

# The cuts may lose so much of what sharing saves, beyond the least, where that makes pieces more even.
EVEN_LOSS = 0.01
EVEN_ROUNDS = 8


class Piece(NamedTuple):
    """Trajectories in DFS order; `tree_tokens` counts a prefix that they share once; `batches` are those that
    are computed together, as positions."""

    trajectories: tuple[Trajectory, ...]
    tree_tokens: int
    batches: tuple[tuple[int, ...], ...]


class Leaves(NamedTuple):
    """Of trajectories in DFS order the length, and the longest prefix shared with the one before:
    int64[N]."""

    lengths: Int64s
    shared: Int64s

    @property
    def tree_tokens(self) -> int:
        return int((self.lengths - self.shared).sum())


def pack(trajectories: Sequence[Trajectory], limit_tokens: int, ranks: int = 1) -> list[Piece]:
    """A pure function of the trajectories, in whatever order: pieces of at most `limit_tokens` tokens in
    rows a rank of the cell that computes it, longest first. A trajectory beyond that gets a piece of its own.
    """
    ordered = sorted(trajectories, key=lambda t: (t.token_ids, t.execution, t.leaf))
    leaves = measure(ordered)
    bounds = even_cuts(leaves, limit_tokens * ranks)
    pieces = []
    for first, end in pairwise(bounds):
        its = tuple(ordered[first:end])
        batches = _batches([t.length_tokens for t in its], limit_tokens)
        pieces.append(Piece(its, span_tokens(leaves, first, end), batches))
    return sorted(pieces, key=lambda piece: -sum(t.length_tokens for t in piece.trajectories))


def measure(ordered: Sequence[Trajectory]) -> Leaves:
    ids = [np.frombuffer(t.token_ids, "<i4") for t in ordered]
    shared = [0] + [_common(one, other) for one, other in pairwise(ids)]
    lengths = np.array([len(its) for its in ids], np.int64)
    return Leaves(lengths, np.array(shared[: len(ids)], np.int64))


def span_tokens(leaves: Leaves, first: int, end: int) -> int:
    """Tree tokens of an interval: what it shares with the leaf before it is its own as well."""
    new = leaves.lengths[first:end] - leaves.shared[first:end]
    return int(new.sum() + leaves.shared[first])


def even_cuts(leaves: Leaves, limit_tokens: int) -> list[int]:
    """Bounds of the intervals, 0 and N included. As few as at the cheapest cuts, and with a lower limit if
    that loses little: then no piece is a small rest."""
    cheapest = _cuts(leaves, limit_tokens)
    saved = int(leaves.lengths.sum()) - leaves.tree_tokens
    most = _cost(leaves, cheapest) + int(EVEN_LOSS * saved)
    best, low, high = cheapest, int(leaves.lengths.sum()) // max(len(cheapest) - 1, 1), limit_tokens
    for _ in range(EVEN_ROUNDS):
        if low >= high:
            break
        middle = (low + high) // 2
        cuts = _cuts(leaves, middle)
        if len(cuts) <= len(cheapest) and _cost(leaves, cuts) <= most:
            best, high = cuts, middle
        else:
            low = middle + 1
    return best


def _cuts(leaves: Leaves, limit_tokens: int) -> list[int]:
    """The cheapest cuts within the limit; of equally cheap ones the fewest, then the latest."""
    count = len(leaves.lengths)
    rows = np.concatenate([[0], np.cumsum(leaves.lengths)])
    sums = np.concatenate([[0], np.cumsum(leaves.lengths - leaves.shared)])
    # Tokens and pieces in one number, the tokens first.
    cost = np.zeros(count + 1, np.int64)
    before = np.zeros(count + 1, np.int64)
    first = 0
    for end in range(1, count + 1):
        while first < end - 1 and rows[end] - rows[first] > limit_tokens:
            first += 1
        tokens = sums[end] - sums[first:end] + leaves.shared[first:end]
        total = cost[first:end] + tokens * (count + 1) + 1
        at = len(total) - 1 - int(np.argmin(total[::-1]))
        cost[end], before[end] = total[at], first + at
    bounds = [count]
    while bounds[-1] > 0:
        bounds.append(int(before[bounds[-1]]))
    return bounds[::-1]


def _cost(leaves: Leaves, bounds: Sequence[int]) -> int:
    return leaves.tree_tokens + int(leaves.shared[list(bounds[1:-1])].sum())


def _batches(lengths: Sequence[int], limit_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Longest first, each at most the limit when its rows are padded to its longest (or one row)."""
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= limit_tokens:
            batches[-1].append(position)
        else:
            batches.append([position])
    return tuple(map(tuple, batches))


def _common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Length of the longest common prefix."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length
