"""Advantages of executions relative to their group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

# Below this, differences of scores are not blown up to unit variance.
STD_FLOOR = 1e-3
# Scores that differ by rounding only are equal.
_SAME = 1e-9


def advantages(scores: Mapping[str, float], kind: Literal["mean_std", "mean"]) -> dict[str, float]:
    """Score minus the group's mean, by execution; with `mean_std` over the population's standard deviation
    (at least STD_FLOOR). All exactly 0 where all scores are the same."""
    if not scores:
        return {}
    # In order of id, so that rounding does not depend on who ended first.
    executions = sorted(scores)
    values = np.array([scores[execution] for execution in executions], np.float64)
    if np.ptp(values) <= _SAME:
        return dict.fromkeys(executions, 0.0)
    centred = values - values.mean()
    if kind == "mean_std":
        centred /= max(float(values.std()), STD_FLOOR)
    return dict(zip(executions, centred.tolist(), strict=True))


def shuffled(of_execution: Mapping[str, float], random: np.random.Generator) -> dict[str, float]:
    """A control from which nothing can be learned: the same advantages, dealt out anew, so that each
    execution's expected advantage is the group's mean, 0."""
    executions = sorted(of_execution)
    dealt = random.permutation([of_execution[execution] for execution in executions])
    return dict(zip(executions, dealt.tolist(), strict=True))
