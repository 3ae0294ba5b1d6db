"""What a benchmark prints: a table of its figures and gates, and one line of JSON."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

Sense = Literal[">=", "<="]


class Gate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A bound that a figure must keep. `value` is None where it could not be measured, for `reason`."""

    value: float | None
    limit: float
    met: bool
    sense: Sense
    reason: str = ""


class Report:
    """Figures by name, each name ending in its unit, and the gates on them."""

    def __init__(self, benchmark: str) -> None:
        self.benchmark = benchmark
        self.figures: dict[str, float] = {}
        self.gates: dict[str, Gate] = {}

    def figure(self, name: str, value: float) -> None:
        if name in self.figures:
            raise ValueError(f"the figure {name} is there already")
        self.figures[name] = _short(value)

    def at_least(self, name: str, value: float, limit: float) -> None:
        self._gate(name, value, limit, ">=", value >= limit)

    def at_most(self, name: str, value: float, limit: float) -> None:
        self._gate(name, value, limit, "<=", value <= limit)

    def unmet(self, name: str, sense: Sense, limit: float, reason: str) -> None:
        """A gate whose figure could not be measured."""
        self.gates[name] = Gate(value=None, limit=limit, met=False, sense=sense, reason=reason)

    def _gate(self, name: str, value: float, limit: float, sense: Sense, met: bool) -> None:
        self.gates[name] = Gate(value=_short(value), limit=limit, met=met, sense=sense)

    @property
    def met(self) -> bool:
        return all(gate.met for gate in self.gates.values())

    def json_line(self) -> str:
        value = {"benchmark": self.benchmark, "figures": self.figures, "gates": self.gates}
        return msgspec.json.encode(value).decode()

    def print(self, console: Console) -> None:
        if self.figures:
            console.print(self._figures())
        if self.gates:
            console.print(self._gates())

    def _figures(self) -> Table:
        table = Table("figure", title=self.benchmark, title_justify="left")
        table.add_column("value", justify="right")
        for name, value in self.figures.items():
            table.add_row(name, _readable(value))
        return table

    def _gates(self) -> Table:
        table = Table("gate")
        table.add_column("value", justify="right")
        table.add_column("limit", justify="right")
        table.add_column("met", overflow="fold")
        for name, gate in self.gates.items():
            value = "-" if gate.value is None else _readable(gate.value)
            met = "yes" if gate.met else f"NO{f': {gate.reason}' if gate.reason else ''}"
            table.add_row(name, value, f"{gate.sense} {_readable(gate.limit)}", met)
        return table


def _short(value: float) -> float:
    """Four significant digits: more would be noise. Not a number is no figure."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is no figure")
    return float(f"{value:.4g}")


def _readable(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
