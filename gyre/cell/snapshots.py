"""The core's shelf of immutable weight snapshots: training and published version, leases of readers."""

from __future__ import annotations

from gyre.cell.messages import Snapshot, SnapshotKind
from gyre.rdma import RegionHandle


class SnapshotShelf:
    """At most three snapshots live: the training one, the published one, and one more that readers hold.

    A cell holds one lease: asking again gives up the one before, so that a cell that died keeps nothing.
    """

    def __init__(self) -> None:
        self._regions: dict[int, RegionHandle] = {}
        self._leases: dict[int, tuple[int, int]] = {}
        self._next_lease = 0
        self.training = -1
        self.published = -1

    @property
    def full(self) -> bool:
        """No room for another version until a reader lets go."""
        return len(self._regions) >= 3

    def add(self, version: int, region: RegionHandle) -> list[RegionHandle]:
        """A new training version. Returns the regions that may be freed."""
        self._regions[version] = region
        self.training = version
        return self._collect()

    def publish(self) -> list[RegionHandle]:
        """The training version becomes the published one. Returns the regions that may be freed."""
        self.published = self.training
        return self._collect()

    def lease(self, cell: int, kind: SnapshotKind) -> tuple[Snapshot, list[RegionHandle]]:
        """A snapshot for `cell` to read, and the regions that may be freed."""
        version = self.training if kind == "training" else self.published
        self._forget(cell)
        self._next_lease += 1
        self._leases[self._next_lease] = (cell, version)
        snapshot = Snapshot(version=version, region=self._regions[version], lease=self._next_lease)
        return snapshot, self._collect()

    def release(self, lease: int) -> list[RegionHandle]:
        """The reader is done (an unknown lease is no error). Returns the regions that may be freed."""
        self._leases.pop(lease, None)
        return self._collect()

    def _forget(self, cell: int) -> None:
        self._leases = {lease: held for lease, held in self._leases.items() if held[0] != cell}

    def _collect(self) -> list[RegionHandle]:
        needed = {self.training, self.published} | {version for _, version in self._leases.values()}
        return [self._regions.pop(version) for version in list(self._regions) if version not in needed]
