"""What an engine sampled, call by call, whether or not whoever asked for it has it."""

from __future__ import annotations

import msgspec
import structlog

log = structlog.get_logger()

# Of 256 executions at a time with 500 calls each there are half as many.
LIMIT_LEGS = 1 << 18


class SampledLeg(msgspec.Struct, frozen=True, kw_only=True):
    """A call's `stay` at an engine, its first is 0: so many `tokens` were sampled there."""

    call: str
    stay: int
    tokens: int


class SampledLedger:
    """The legs of each session, until they are written down elsewhere and it is forgotten. Beyond
    `limit_legs` the oldest sessions go, and the log says so."""

    def __init__(self, limit_legs: int = LIMIT_LEGS) -> None:
        self._limit_legs = limit_legs
        self._legs: dict[str, list[SampledLeg]] = {}
        self._count = 0

    def note(self, session: str, leg: SampledLeg) -> None:
        """A leg is over."""
        if leg.tokens == 0:
            return
        self._legs.setdefault(session, []).append(leg)
        self._count += 1
        while self._count > self._limit_legs and len(self._legs) > 1:
            oldest = next(iter(self._legs))
            tokens = sum(leg.tokens for leg in self._legs[oldest])
            log.warning("sampled_tokens_let_go", session=oldest, tokens=tokens)
            self.forget(oldest)

    def of(self, session: str) -> tuple[SampledLeg, ...]:
        """In their order."""
        return tuple(self._legs.get(session, ()))

    def forget(self, session: str) -> None:
        """It is written down."""
        self._count -= len(self._legs.pop(session, ()))
