"""The figures of a job over its steps: the numbers in its `step` and `eval` events."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import msgspec

from gyre.watch.sinks import Event

FIGURE_EVENTS = frozenset({"step", "eval"})


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """`values` by name, such as `train/reward`, `train/grad_norm` or `eval/score`."""

    step: int
    values: dict[str, float]


class StepRewards:
    """A structlog processor that gives each `step` event its `reward`, the mean over the step's
    executions, taken from the `group` events that came before it (none where a step was replayed)."""

    def __init__(self) -> None:
        self._scores: dict[int, list[float]] = {}

    def __call__(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event["event"] == "group":
            self._scores.setdefault(event["step"], []).extend(event["scores"].values())
        elif event["event"] == "step" and (scores := self._scores.pop(event["step"], [])):
            event["reward"] = sum(scores) / len(scores)
        return event


def figures(event: Event) -> Figures | None:
    """The figures of an event, None where it has none."""
    step = event.get("step")
    if event["event"] not in FIGURE_EVENTS or not isinstance(step, int):
        return None
    group = "eval" if event["event"] == "eval" else "train"
    values = {
        f"{group}/{name}": float(value)
        for name, value in event.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in ("step", "monotonic_s")
    }
    return Figures(step=step, values=values)
