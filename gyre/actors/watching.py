"""Who is to know when a life ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from gyre.actors.errors import ExitReason
from gyre.actors.messages import Down
from gyre.actors.ref import Ref


class Watchers:
    """Those who monitor `ref`, each once."""

    __slots__ = ("_ref", "_tell")

    def __init__(self, ref: Ref) -> None:
        self._ref = ref
        self._tell: dict[Hashable, Callable[[Down], None]] | None = None

    def __bool__(self) -> bool:
        return bool(self._tell)

    def add(self, key: Hashable, tell: Callable[[Down], None]) -> None:
        if self._tell is None:
            self._tell = {}
        self._tell[key] = tell

    def discard(self, key: Hashable) -> None:
        if self._tell is not None:
            self._tell.pop(key, None)

    def tell(self, reason: ExitReason) -> None:
        """The life is over."""
        watchers, self._tell = self._tell, None
        for tell in (watchers or {}).values():
            tell(Down(ref=self._ref, reason=reason))
