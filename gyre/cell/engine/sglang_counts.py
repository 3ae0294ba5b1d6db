"""What a SGLang engine has done, counted from what it was told."""

from __future__ import annotations

import time
from collections.abc import Collection

from gyre.cell.engine.base import EngineMetrics
from gyre.cell.engine.sglang_call import Call

# Of the newest call's rate in the mean.
RATE_SHARE = 0.2
# To all calls together. An event costs a server about 0.1 ms in Python.
EVENTS_PER_S = 400.0


class Counts:
    """Counters since start. KV in use is the server's own word, as of its last answer."""

    def __init__(self, block_tokens: int, blocks: int) -> None:
        self._block_tokens = block_tokens
        self._blocks = blocks
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self._cached_tokens = 0
        self._retractions = 0
        self._tokens_per_s = 0.0
        self._busy_s = 0.0
        self._busy_since_s: float | None = None
        self.used_tokens = 0

    def fed(self, call: Call, new_tokens: int, first: bool) -> None:
        """After a piece of a call."""
        self._generated_tokens += new_tokens
        if first:
            cached = call.reading.cached_tokens or 0
            self._cached_tokens += cached
            self._prefilled_tokens += len(call.request.prompt_ids) - cached

    def live(self, calls: int) -> None:
        """After the number of calls has changed."""
        now_s = time.monotonic()
        if calls and self._busy_since_s is None:
            self._busy_since_s = now_s
        elif not calls and self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
            self._busy_since_s = None

    def over(self, call: Call) -> None:
        self._retractions += call.reading.retractions
        if call.tokens_per_s is not None:
            share = RATE_SHARE if self._tokens_per_s else 1.0
            self._tokens_per_s += (call.tokens_per_s - self._tokens_per_s) * share

    def tokens_together(self, interval_s: float, calls: int) -> int:
        """How many a call should be told of at a time, to hear something once an interval; less often where
        so many calls would have a server talk more than generate. 1 without an interval."""
        seldom_s = max(interval_s, calls / EVENTS_PER_S) if interval_s > 0 else 0.0
        return max(1, round(self._tokens_per_s * seldom_s))

    def metrics(self, calls: Collection[Call]) -> EngineMetrics:
        unended = [call for call in calls if not call.ended.is_set()]
        running = sum(call.running for call in unended)
        busy_now_s = time.monotonic() - self._busy_since_s if self._busy_since_s is not None else 0.0
        return EngineMetrics(
            running=running,
            waiting=len(unended) - running,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=self._retractions + sum(call.reading.retractions for call in calls),
            kv_blocks_used=-(-self.used_tokens // self._block_tokens) if unended else 0,
            kv_blocks_total=self._blocks,
            busy_s=self._busy_s + busy_now_s,
        )
