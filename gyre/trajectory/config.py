"""The job file's table about sampling."""

from __future__ import annotations

from typing import Literal

import msgspec


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounded sampling of trajectories from a tree, and advantages. `shuffle_advantages` is a control:
    with it nothing can be learned."""

    max_trajectories: int = 5
    advantage: Literal["mean_std", "mean"] = "mean_std"
    shuffle_advantages: bool = False
    seed: int = 0
