"""Which engine takes a call: decisions only, no I/O.

A session stays where its prefix is; a new one goes to the least loaded engine. A call that has to move
prefers cells that stay in rollout role longest: cells leave in their order, so that is the latest one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, NamedTuple, TypeVar

EngineRef = TypeVar("EngineRef")


class EngineKey(NamedTuple):
    """One engine in one life of its cell."""

    cell: int
    incarnation: int
    engine: int


class Seat(NamedTuple, Generic[EngineRef]):
    """Where a call goes."""

    key: EngineKey
    ref: EngineRef


class _Engine(Generic[EngineRef]):
    def __init__(self, ref: EngineRef, capacity_calls: int) -> None:
        self.ref = ref
        self.capacity_calls = capacity_calls
        self.open = True
        self.calls: set[str] = set()


class Router(Generic[EngineRef]):
    """Engines of open cells, calls in flight at each, and the engine each session last used."""

    def __init__(self) -> None:
        self._engines: dict[EngineKey, _Engine[EngineRef]] = {}
        self._seats: dict[str, EngineKey] = {}
        # Sessions in the order of their last calls.
        self._affinity: dict[str, EngineKey] = {}
        self._promised: dict[str, EngineKey] = {}

    def open(self, cell: int, incarnation: int, engines: Collection[EngineRef], capacity_calls: int) -> None:
        """The cell admits calls, in this life only: engines of an earlier one admit none any more."""
        self.close(cell)
        each = max(1, capacity_calls // max(1, len(engines)))
        for index, ref in enumerate(engines):
            key = EngineKey(cell, incarnation, index)
            engine = self._engines.setdefault(key, _Engine(ref, each))
            engine.open, engine.ref, engine.capacity_calls = True, ref, each

    def close(self, cell: int) -> tuple[str, ...]:
        """The cell admits no more calls. Answers those in flight there."""
        for key in [key for key in self._engines if key.cell == cell]:
            self._engines[key].open = False
            self._forget_if_idle(key)
        return self.calls_at(cell)

    def fail(self, key: EngineKey) -> None:
        """This engine is dead: it admits no calls until its cell opens in another life."""
        if (engine := self._engines.get(key)) is not None:
            engine.open = False
            self._forget_if_idle(key)

    def pick(
        self, session: str, *, exclude: Collection[EngineKey] = (), moved: bool = False
    ) -> Seat[EngineRef] | None:
        """The engine for a call of `session`, None where no open one is left. `moved`: the call was in
        flight at an engine that ended it."""
        usable = {key: e for key, e in self._engines.items() if e.open and key not in exclude}
        if not usable:
            return None
        key = self._affinity.pop(session, None)
        if key not in usable:
            key = max(usable, key=self._stays_longest if moved else self._least_loaded)
        self._affinity[session] = key
        return Seat(key, usable[key].ref)

    def place(self, session: str) -> Seat[EngineRef] | None:
        """As `pick` for a session that moves without a call: when it called last stays as it was."""
        usable = {key: e for key, e in self._engines.items() if e.open}
        if not usable:
            return None
        key = self._affinity.get(session)
        if key not in usable:
            key = max(usable, key=self._stays_longest)
        self._affinity[session] = key
        return Seat(key, usable[key].ref)

    def put(self, session: str, key: EngineKey) -> None:
        """Its next call goes there, if that is open then."""
        if session in self._affinity:
            self._affinity[session] = key

    def begin(self, call: str, key: EngineKey) -> None:
        """The call is in flight there."""
        self._engines[key].calls.add(call)
        self._seats[call] = key
        self._promised.pop(call, None)

    def promise(self, call: str, key: EngineKey) -> None:
        """The call is about to go there: it counts, until it begins somewhere or is over."""
        self._promised[call] = key

    def over(self, call: str) -> None:
        """The call will go nowhere any more."""
        self._promised.pop(call, None)

    def end(self, call: str) -> None:
        """The call is in flight nowhere."""
        key = self._seats.pop(call, None)
        if key is not None:
            self._engines[key].calls.discard(call)
            self._forget_if_idle(key)

    def forget_session(self, session: str) -> None:
        self._affinity.pop(session, None)

    def sessions_at(self, cell: int) -> tuple[tuple[str, Seat[EngineRef]], ...]:
        """Sessions whose last call went to an engine of the cell that is still there, the latest first."""
        return tuple(
            (session, Seat(key, self._engines[key].ref))
            for session, key in reversed(self._affinity.items())
            if key.cell == cell and key in self._engines
        )

    def seat_of(self, session: str) -> EngineKey | None:
        """Where its last call went."""
        return self._affinity.get(session)

    def calls_at(self, cell: int) -> tuple[str, ...]:
        """Calls in flight at a cell, in whatever life of it."""
        return tuple(call for key, e in self._engines.items() if key.cell == cell for call in sorted(e.calls))

    @property
    def any_open(self) -> bool:
        return any(engine.open for engine in self._engines.values())

    def _least_loaded(self, key: EngineKey) -> tuple[float, int, int]:
        return (-self._load(key), key.cell, -key.engine)

    def _stays_longest(self, key: EngineKey) -> tuple[bool, int, float, int]:
        return (self._load(key) < 1, key.cell, -self._load(key), -key.engine)

    def _load(self, key: EngineKey) -> float:
        """Calls in flight over what the engine carries well."""
        engine = self._engines[key]
        promised = sum(to == key for to in self._promised.values())
        return (len(engine.calls) + promised) / engine.capacity_calls

    def _forget_if_idle(self, key: EngineKey) -> None:
        engine = self._engines.get(key)
        if engine is not None and not engine.open and not engine.calls:
            del self._engines[key]
