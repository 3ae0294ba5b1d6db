"""The job file's table about the schedule."""

from __future__ import annotations

from typing import Literal

import msgspec


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`burst_steps` is mu, `lead_steps` is phi: at a burst boundary Q_b = (phi + mu) * B groups are
    dispatched and not yet trained. A satellite is called back within a burst when more than `call_back` times
    C_R calls wait; 0: never."""

    policy: Literal["elastic"] = "elastic"
    burst_steps: int = 1
    lead_steps: int = 0
    call_back: float = 1.0
