"""Statuses and events such as a job gives them."""

from __future__ import annotations

from typing import Any

from gyre.cell.engine.base import EngineMetrics
from gyre.cell.messages import CellStatus
from gyre.schedule.messages import ScheduleStatus


def cell(number: int, **changes: Any) -> CellStatus:
    fields: dict[str, Any] = {
        "cell": number,
        "role": "rollout",
        "changing": False,
        "version": 3,
        "micro_steps": 0,
        "tokens_per_s": 0.0,
        "busy_fraction": 0.0,
        "engine": EngineMetrics(),
    }
    return CellStatus(**(fields | changes))


def schedule(*cells: CellStatus, **changes: Any) -> ScheduleStatus:
    fields: dict[str, Any] = {
        "dispatched": 0,
        "started": 0,
        "finished": 0,
        "step": 0,
        "steps": 10,
        "published": 0,
        "ready_micro_steps": 0,
        "role_changes": 0,
        "role_changes_with_calls_in_flight": 0,
        "cells": cells,
    }
    return ScheduleStatus(**(fields | changes))


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, "level": "info", "time": "2026-11-29T10:00:00.000Z", "monotonic_s": 1.5} | fields
