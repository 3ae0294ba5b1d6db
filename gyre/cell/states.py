"""How long each state of a change took, by name and in order, and the events that say so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

log = structlog.get_logger()


class StateTimes:
    """Seconds by state. A state that is entered again goes on counting; one that fails counts too. `tell`
    hears of each when it is over, and why it failed."""

    def __init__(self, tell: Callable[[str, float, str | None], None] | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._tell = tell

    @contextmanager
    def measure(self, state: str) -> Iterator[None]:
        began = time.monotonic()
        cause: str | None = None
        try:
            yield
        except BaseException as error:
            cause = str(error) or type(error).__name__
            raise
        finally:
            took_s = time.monotonic() - began
            self._seconds[state] = self._seconds.get(state, 0.0) + took_s
            if self._tell is not None:
                self._tell(state, took_s, cause)

    @property
    def by_state_s(self) -> dict[str, float]:
        return {state: round(seconds, 6) for state, seconds in self._seconds.items()}


def log_state(change: str, cell: int, state: str, seconds: float, cause: str | None = None) -> None:
    """A state of a role change is over, or has failed for `cause`."""
    fields: dict[str, Any] = {"change": change, "cell": cell, "state": state, "seconds": round(seconds, 4)}
    if cause is None:
        log.info("role_change_state", **fields)
    else:
        log.warning("role_change_state_failed", **fields, cause=cause)
