"""Advantages of executions relative to their group."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gyre.trajectory.config import AdvantageKind

# Below this, differences of scores are not blown up to unit variance.
STD_FLOOR = 1e-3
# Scores that differ by rounding only are equal.
_SAME = 1e-9


def advantages(scores: Mapping[str, float], kind: AdvantageKind) -> dict[str, float]:
    """By execution its score minus the group's mean; with `mean_std` over the population's standard deviation
    (at least STD_FLOOR); with `leave_one_out` minus the mean of the others. All exactly 0 where all scores
    are the same."""
    if not scores:
        return {}
    # In order of id, so that rounding does not depend on who ended first.
    executions = sorted(scores)
    values = np.array([scores[execution] for execution in executions], np.float64)
    if np.ptp(values) <= _SAME:
        return dict.fromkeys(executions, 0.0)
    centred = values - values.mean()
    centred[np.abs(centred) <= _SAME] = 0.0
    if kind == "mean_std":
        centred /= max(float(values.std()), STD_FLOOR)
    elif kind == "leave_one_out":
        # x - (sum - x) / (n - 1), written so that it rounds as the mean does.
        centred *= len(values) / (len(values) - 1)
    return dict(zip(executions, centred.tolist(), strict=True))


def shuffled(of_execution: Mapping[str, float], random: np.random.Generator) -> dict[str, float]:
    """A control from which nothing can be learned: the same advantages, dealt out anew, so that each
    execution's expected advantage is the group's mean, 0."""
    executions = sorted(of_execution)
    dealt = random.permutation([of_execution[execution] for execution in executions])
    return dict(zip(executions, dealt.tolist(), strict=True))
