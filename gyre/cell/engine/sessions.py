"""What each session's last call was, for who asks for its KV afterwards."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class LastCalls:
    """The tokens of the last call of each session, of the latest sessions only: `limit_tokens` in all."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._held_tokens = 0
        self._calls: OrderedDict[str, array[int]] = OrderedDict()

    def note(self, session: str, tokens: Sequence[int]) -> None:
        """A call has ended with these, prompt and output."""
        self._held_tokens -= len(self._calls.pop(session, ()))
        self._calls[session] = array("i", tokens)
        self._held_tokens += len(tokens)
        while self._held_tokens > self._limit_tokens:
            _, oldest = self._calls.popitem(last=False)
            self._held_tokens -= len(oldest)

    def drop(self, session: str) -> None:
        """It is not known any more."""
        self._held_tokens -= len(self._calls.pop(session, ()))

    def tokens(self, session: str) -> Sequence[int]:
        """Empty for a session that is not known any more."""
        return self._calls.get(session, ())

    def sessions(self) -> Iterator[str]:
        """Those that are known."""
        return iter(self._calls)

    def forget(self) -> None:
        self._calls.clear()
        self._held_tokens = 0
