"""Which cached KV a call may begin with: that of the weights now, or what its session has of older ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gyre.cell.engine.blocks import BlockPool, CachedBlock

# Of a session: each is looked for whenever it calls.
MOST_OLDER = 4

Digests = dict[int, list[bytes]]
"""The hashes of some first blocks of a sequence, by the version that its KV begins with."""


class Prefix(NamedTuple):
    """The first blocks of a sequence: `chain`, not held, of KV whose oldest is of `version`."""

    version: int
    chain: list[CachedBlock]


class Prefixes:
    """Of a pool whose chains begin with the version of the weights that computed their first block. Under
    weights that came since only sessions that were there then find such a chain, and go on with it: what
    they add is of the weights of its time."""

    def __init__(self, pool: BlockPool) -> None:
        self.version = 0
        self._pool = pool
        self._older: dict[str, tuple[int, ...]] = {}

    def find(self, session: str, tokens: Sequence[int], digests: Digests, limit: int | None = None) -> Prefix:
        """The longest of at most `limit` blocks; of equally long ones the newest. `digests` is added to."""
        best = Prefix(self.version, [])
        for version in (self.version, *self._older.get(session, ())):
            known = digests.setdefault(version, [])
            chain = self._pool.find(known, tokens, version, limit)
            if len(chain) > len(best.chain):
                best = Prefix(version, chain)
        return best

    def restart(self, version: int) -> None:
        """No session has KV of older weights."""
        self.version = version
        self._older.clear()

    def go_on(self, version: int, sessions: Iterable[str]) -> None:
        """These, which are there now, may use what they have; others that are not any more may not."""
        self._older = {
            session: (self.version, *self._older.get(session, ()))[:MOST_OLDER] for session in sessions
        }
        self.version = version

    def drop(self, session: str) -> None:
        """It goes on with no KV of older weights."""
        self._older.pop(session, None)

    def admit(self, session: str, version: int) -> None:
        """KV of these weights has come for it."""
        older = self._older.get(session, ())
        if version != self.version and version not in older:
            self._older[session] = tuple(sorted((version, *older), reverse=True))[:MOST_OLDER]
