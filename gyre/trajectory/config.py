"""The job file's table about sampling."""

from __future__ import annotations

from typing import Literal

import msgspec

DrawRule = Literal["paper", "coverage", "all"]
AdvantageKind = Literal["mean_std", "mean", "leave_one_out"]


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which trajectories of a tree are trained, and advantages. `max_staleness`: calls that were sampled
    under weights more than so many versions older than those that are trained are context only.
    `shuffle_advantages` is a control: with it nothing can be learned."""

    draw: DrawRule = "paper"
    max_trajectories: int = 5
    max_staleness: int | None = None
    advantage: AdvantageKind = "mean_std"
    shuffle_advantages: bool = False
    seed: int = 0
