"""What to do when a child ends: a pure decision."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gyre.actors.specs import Restart, Strategy

FIRST_DELAY_S = 0.01
LONGEST_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class Supervision:
    """How a parent keeps its children: more than `max_restarts` within `window_s` is its own failure."""

    strategy: Strategy = "one_for_one"
    max_restarts: int = 3
    window_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Forget:
    """The child is gone for good."""


@dataclass(frozen=True, slots=True)
class Escalate:
    """The parent fails."""

    why: str


@dataclass(frozen=True, slots=True)
class RestartChildren:
    """Stop the living of `names` in reverse, wait, start them in order."""

    names: tuple[str, ...]
    delay_s: float


Decision = Forget | Escalate | RestartChildren


@dataclass(slots=True)
class Restarts:
    """The restarts of one parent within its window."""

    supervision: Supervision
    _times: deque[float] = field(default_factory=deque)

    def decide(
        self, name: str, restart: Restart, *, abnormal: bool, watched: bool, order: Sequence[str], now: float
    ) -> Decision:
        """`order`: the children's names as they were started; `watched`: someone monitors the child."""
        if restart == "temporary":
            return Escalate("it crashed and nobody monitors it") if abnormal and not watched else Forget()
        if restart == "transient" and not abnormal:
            return Forget()
        return self._restart(name, order, now)

    def _restart(self, name: str, order: Sequence[str], now: float) -> Decision:
        rules = self.supervision
        while self._times and now - self._times[0] > rules.window_s:
            self._times.popleft()
        if len(self._times) >= rules.max_restarts:
            return Escalate(f"{rules.max_restarts} restarts in {rules.window_s:g} s were not enough")
        delay = min(FIRST_DELAY_S * 2 ** min(len(self._times), 16), LONGEST_DELAY_S)
        self._times.append(now)
        names: tuple[str, ...]
        match rules.strategy:
            case "one_for_one":
                names = (name,)
            case "rest_for_one":
                names = tuple(order[order.index(name) :])
            case "one_for_all":
                names = tuple(order)
        return RestartChildren(names, delay)
