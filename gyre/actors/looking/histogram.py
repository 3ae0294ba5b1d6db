"""Durations in little memory."""

from __future__ import annotations

from math import frexp, ldexp

# Buckets to a doubling: a quantile is at most a quarter too high.
STEPS = 4


class Histogram:
    """Counts durations by their magnitude."""

    __slots__ = ("_buckets", "count", "sum_s")

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        fraction, exponent = frexp(max(seconds, 1e-9))  # 0.5 <= fraction < 1
        bucket = exponent * STEPS + int((fraction - 0.5) * 2 * STEPS)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def quantile_s(self, part: float) -> float:
        """The upper bound of the bucket in which that part of all has been met; 0 where there is none."""
        wanted = part * self.count
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                exponent, step = divmod(bucket, STEPS)
                return ldexp(0.5 + (step + 1) / (2 * STEPS), exponent)
        return 0.0
