"""The core's shelf of immutable weight snapshots: training and published version, leases of readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gyre.actors import Ref
from gyre.cell.messages import Snapshot, SnapshotKind
from gyre.rdma import RegionHandle

# The training version, the published one, and one more that readers hold.
MOST = 3


@dataclass(frozen=True)
class Held:
    """A lease: `cell` reads `version`, until `reader`, if it is known, is dead."""

    cell: int
    version: int
    reader: Ref | None


class SnapshotShelf:
    """At most `MOST` snapshots live. A cell holds one lease: asking again gives up the one before."""

    def __init__(self) -> None:
        self._regions: dict[int, RegionHandle] = {}
        self._leases: dict[int, Held] = {}
        self._next_lease = 0
        self.training = -1
        self.published = -1

    @property
    def regions(self) -> tuple[RegionHandle, ...]:
        """Of the versions that live. Where they are `MOST` there is no room for another."""
        return tuple(self._regions.values())

    def add(self, version: int, region: RegionHandle) -> list[RegionHandle]:
        """A new training version. Returns the regions that may be freed."""
        self._regions[version] = region
        self.training = version
        return self._collect()

    def publish(self) -> list[RegionHandle]:
        """The training version becomes the published one. Returns the regions that may be freed."""
        self.published = self.training
        return self._collect()

    def lease(
        self, cell: int, kind: SnapshotKind, reader: Ref | None = None
    ) -> tuple[Snapshot, list[RegionHandle]]:
        """A snapshot for `cell` to read, and the regions that may be freed."""
        version = self.training if kind == "training" else self.published
        self._keep(lambda held: held.cell != cell)
        self._next_lease += 1
        self._leases[self._next_lease] = Held(cell, version, reader)
        snapshot = Snapshot(version=version, region=self._regions[version], lease=self._next_lease)
        return snapshot, self._collect()

    def release(self, lease: int) -> list[RegionHandle]:
        """The reader is done (an unknown lease is no error). Returns the regions that may be freed."""
        self._leases.pop(lease, None)
        return self._collect()

    def forget(self, reader: Ref) -> list[RegionHandle]:
        """It is dead. Returns the regions that may be freed."""
        self._keep(lambda held: held.reader != reader)
        return self._collect()

    def drop_hindering(self) -> tuple[list[Held], list[RegionHandle]]:
        """Ends the leases of versions that nobody else needs: whose they were, and the regions that may be
        freed."""
        needed = {self.training, self.published}
        dropped = self._keep(lambda held: held.version in needed)
        return dropped, self._collect()

    def _keep(self, wanted: Callable[[Held], bool]) -> list[Held]:
        """Answers those that are not."""
        ended = [held for held in self._leases.values() if not wanted(held)]
        self._leases = {lease: held for lease, held in self._leases.items() if wanted(held)}
        return ended

    def _collect(self) -> list[RegionHandle]:
        needed = {self.training, self.published} | {held.version for held in self._leases.values()}
        return [self._regions.pop(version) for version in list(self._regions) if version not in needed]
