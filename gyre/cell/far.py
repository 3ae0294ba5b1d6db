"""A satellite whose core is on another machine: weights are brought here, gradients fetched from here."""

from __future__ import annotations

import msgspec

from gyre.actors import Ref
from gyre.cell.messages import Snapshot
from gyre.rdma import Lending


class Far:
    """Copies of the core's snapshots for the ranks of one cell. `me` lends this machine's regions to the
    core."""

    def __init__(self, lending: Lending, core: Ref, me: Ref) -> None:
        self._lending = lending
        self._core = core
        self.me = me

    async def bring(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot in a region of this machine."""
        name = f"{snapshot.region.name}-{self.me.name}-l{snapshot.lease}"
        region = await self._lending.fetch(snapshot.region, self._core, name)
        return msgspec.structs.replace(snapshot, region=region)

    def free(self, snapshot: Snapshot) -> None:
        """It was brought, and is loaded."""
        self._lending.free(snapshot.region)
