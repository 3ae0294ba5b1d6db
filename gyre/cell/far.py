"""A satellite whose core is on another machine: weights are brought here, gradients fetched from here."""

from __future__ import annotations

import msgspec

from gyre.actors import Ref
from gyre.cell.messages import Snapshot
from gyre.rdma import RegionHandle, SharedMemory, fetch


class Far:
    """Copies of the core's snapshots for the ranks of one cell. `me` reads this machine's regions to the
    core."""

    def __init__(self, shared: SharedMemory, core: Ref, me: Ref) -> None:
        self._shared = shared
        self._core = core
        self.me = me

    async def bring(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot in a region of this machine."""
        name = f"{snapshot.region.name}-{self.me.name}-l{snapshot.lease}"
        region = await fetch(snapshot.region, self._core, self._shared, name)
        return msgspec.structs.replace(snapshot, region=region)

    def free(self, *regions: RegionHandle) -> None:
        for region in regions:
            self._shared.free(region)
