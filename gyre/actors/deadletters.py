"""Messages that reached nobody."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gyre.actors.log import log

KEPT = 100
LOG_EVERY_S = 1.0
# A peer may name a message as it likes.
MAX_NAME_CHARS = 200
MAX_WHY_CHARS = 1000


class DeadLetter(NamedTuple):
    """Who did not get what, why, and when by the loop's clock."""

    to: str
    message: str
    why: str
    at_s: float


class DeadLetters:
    """Counts all, keeps the last `KEPT`, logs one line a second at most."""

    def __init__(self, node: str, clock: Callable[[], float]) -> None:
        self.count = 0
        self.last: deque[DeadLetter] = deque(maxlen=KEPT)
        self._node = node
        self._clock = clock
        self._logged = 0
        self._logged_at = float("-inf")

    def add(self, to: str, message: str, why: str) -> None:
        self.count += 1
        message, why = message[:MAX_NAME_CHARS], why[:MAX_WHY_CHARS]
        now = self._clock()
        self.last.append(DeadLetter(to, message, why, now))
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            self._log(to, message, why)

    def close(self) -> None:
        if self.count > self._logged:
            last = self.last[-1]
            self._log(last.to, last.message, last.why)

    def _log(self, to: str, message: str, why: str) -> None:
        since = self.count - self._logged
        self._logged = self.count
        log.warning("dead_letters", node=self._node, count=since, to=to, message=message, why=why)
