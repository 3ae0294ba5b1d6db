"""The figures of a job over its steps: the numbers in its `step` and `eval` events."""

from __future__ import annotations

import msgspec

from gyre.watch.sinks import Event

FIGURE_EVENTS = frozenset({"step", "eval"})


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """`values` by name, such as `train/reward`, `train/grad_norm` or `eval/reward`."""

    step: int
    values: dict[str, float]


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
