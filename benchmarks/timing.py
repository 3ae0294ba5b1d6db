"""Segments measured in turn: what disturbs the machine disturbs all of them. The best of several rounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a benchmark does: rounds of its segments, and the share of their full length."""

    rounds: int
    share: float

    def count(self, full: int, least: int = 64) -> int:
        return max(least, int(full * self.share))


# Short and many: on a busy machine some of them run undisturbed.
FULL = Effort(rounds=30, share=1.0)
QUICK = Effort(rounds=1, share=0.02)


@dataclass(frozen=True, slots=True)
class Segment:
    """`run` does a thing `count` times; it may return the seconds that count, where not all of it does."""

    name: str
    count: int
    run: Callable[[int], Awaitable[float | None]]


async def rates(segments: Sequence[Segment], rounds: int) -> dict[str, float]:
    """How often a second each does its thing, in its best round."""
    best = {segment.name: inf for segment in segments}
    for _ in range(rounds):
        for segment in segments:
            start = perf_counter()
            own_s = await segment.run(segment.count)
            took_s = perf_counter() - start if own_s is None else own_s
            best[segment.name] = min(best[segment.name], took_s / segment.count)
    return {name: 1 / took_s for name, took_s in best.items()}
