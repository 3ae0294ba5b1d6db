"""Names that actors are found by, whoever owns them."""

from __future__ import annotations

from gyre.actors.ref import Ref


class Names:
    """Of one node. A name stays with an actor that is restarted here: it leads to the newest life, and to
    nothing between two lives."""

    def __init__(self) -> None:
        self._refs: dict[str, Ref] = {}
        self._names: dict[Ref, set[str]] = {}
        self._ended: set[Ref] = set()

    def register(self, name: str, ref: Ref) -> None:
        """Takes the name over where another actor has it."""
        self.unregister(name)
        self._refs[name] = ref
        self._names.setdefault(ref, set()).add(name)

    def unregister(self, name: str) -> None:
        ref = self._refs.pop(name, None)
        if ref is None:
            return
        names = self._names[ref]
        names.discard(name)
        if not names:
            del self._names[ref]
            self._ended.discard(ref)

    def get(self, name: str) -> Ref | None:
        ref = self._refs.get(name)
        return None if ref in self._ended else ref

    def ended(self, ref: Ref) -> None:
        """That life is over."""
        if ref in self._names:
            self._ended.add(ref)

    def moved(self, old: Ref, new: Ref) -> None:
        """The same actor's next life."""
        for name in self._names.get(old, set()).copy():
            self.register(name, new)
