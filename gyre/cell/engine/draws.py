"""What a draw depends on. The random number of a position is one of the seed and the position alone."""

from __future__ import annotations

from gyre.cell.engine.base import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(state: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at `position`, counted from the first sampled one."""
    # 48 bits: the largest value times a float64 sum stays below that sum: a draw never runs off its end.
    return (_mix(_mix(seed & _MASK) + (position + 1) * _GOLDEN & _MASK) >> 16) * 2.0**-48


def check(sampling: SamplingParams) -> None:
    """Raises ValueError naming the first field that makes no sense."""
    if not 0.0 <= sampling.temperature < float("inf"):
        raise ValueError(f"temperature is {sampling.temperature}: give a finite number >= 0")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p is {sampling.top_p}: give a number in (0, 1]")
    if sampling.top_k < 0:
        raise ValueError(f"top_k is {sampling.top_k}: give an integer >= 0 (0: all tokens)")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}: give an integer >= 1")
