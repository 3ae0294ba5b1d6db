"""The job file's table about what people look at."""

from __future__ import annotations

from typing import Literal

import msgspec


class WatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prometheus_port` 0 is off. `tracker` also sends each step's figures there."""

    prometheus_port: int = 0
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    refresh_s: float = 0.5
