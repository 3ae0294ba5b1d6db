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


class _Groups(msgspec.Struct):
    """What the `group` events of a step came to."""

    scores: list[float] = []
    without_signal: int = 0
    excluded_tokens: int = 0
    tool_calls: int = 0
    malformed_tool_calls: int = 0


class StepRewards:
    """A structlog processor that gives each `step` event its `reward`, the mean over the step's executions,
    how many of its groups were without a signal, how many sampled tokens were not trained and how many tool
    calls were well-formed and malformed, taken from the `group` events that came before it (none where a step
    was replayed)."""

    def __init__(self) -> None:
        self._steps: dict[int, _Groups] = {}

    def __call__(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event["event"] == "group":
            groups = self._steps.setdefault(event["step"], _Groups())
            groups.scores.extend(event["scores"].values())
            groups.without_signal += event.get("without_signal", False)
            groups.excluded_tokens += sum(event.get("excluded_tokens", {}).values())
            groups.tool_calls += event.get("tool_calls", 0)
            groups.malformed_tool_calls += event.get("malformed_tool_calls", 0)
        elif event["event"] == "step" and (groups := self._steps.pop(event["step"], _Groups())).scores:
            event["reward"] = sum(groups.scores) / len(groups.scores)
            event["groups_without_signal"] = groups.without_signal
            event["excluded_tokens"] = groups.excluded_tokens
            event["tool_calls"] = groups.tool_calls
            event["malformed_tool_calls"] = groups.malformed_tool_calls
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
