"""Which rank of a cell computes which rows of a micro-step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gyre.loss import MicroStep, Trajectory

Rows = list[Trajectory]


def deal(micro_step: MicroStep, ranks: int) -> list[list[Rows]]:
    """What is computed at once, in order: of each rank its rows, none where there are fewer rows than ranks.

    As many batches as there are ranks are taken together, and no rank's rows are more tokens, padded to its
    longest, than the largest of these batches.
    """
    batches = micro_step.batched
    return [
        _cut([row for batch in batches[at : at + ranks] for row in batch], ranks)
        for at in range(0, len(batches), ranks)
    ]


def _cut(rows: Sequence[Trajectory], ranks: int) -> list[Rows]:
    """Rows of similar length to each rank, so that the most that one of them computes is the least."""
    ordered = sorted(rows, key=lambda row: -row.length_tokens)
    longest = ordered[0].length_tokens if ordered else 0
    limits = range(longest, longest * len(ordered))
    holds = bisect_left(limits, len(ordered), key=lambda limit: sum(map(len, _runs(ordered, limit, ranks))))
    return _runs(ordered, longest + holds, ranks)


def _runs(ordered: Sequence[Trajectory], limit_tokens: int, ranks: int) -> list[Rows]:
    """Of each rank as many of the longest rows left as keep the limit (one at least), and as leave one to
    each rank after it."""
    runs: list[Rows] = []
    at = 0
    for others in reversed(range(ranks)):
        left = len(ordered) - at
        count = 0
        if left:
            count = min(limit_tokens // ordered[at].length_tokens, max(left - others, 1))
        runs.append(list(ordered[at : at + count]))
        at += count
    return runs
