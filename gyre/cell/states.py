"""How long each state of a change took, by name and in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StateTimes:
    """Seconds by state. A state that is entered again goes on counting; one that fails counts too."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, state: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[state] = self._seconds.get(state, 0.0) + time.monotonic() - began

    @property
    def by_state_s(self) -> dict[str, float]:
        return {state: round(seconds, 6) for state, seconds in self._seconds.items()}
