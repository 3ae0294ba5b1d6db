"""A satellite whose core is on another machine: weights are brought here, gradients fetched from here."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from gyre.actors import Ref, RemoteError
from gyre.cell.messages import GetSnapshot, ReleaseSnapshot, Snapshot
from gyre.cell.pulling import of_region
from gyre.rdma import Corrupt, Lending, RegionError, RegionHandle

log = structlog.get_logger()

LEASE_TIMEOUT_S = 1800.0
TRIES = 3


class Far:
    """Copies of the core's snapshots for the ranks of one cell: each byte comes once, whoever of them needs
    it, to memory that is found once. `me` lends this machine's regions to the core."""

    def __init__(self, lending: Lending, core: Ref, me: Ref) -> None:
        self._lending = lending
        self._core = core
        self.me = me
        self.corrupt = 0

    async def memory(self, nbytes: int) -> tuple[RegionHandle, ...]:
        """That of the copies, of that size. Frees what an earlier life has left of them."""
        await asyncio.to_thread(self._lending.shared.free_all, f"{self.me.name}-*")
        return (await self._lending.reserve(nbytes),)

    async def pull(self, get: GetSnapshot) -> Snapshot:
        """The snapshot, whole, in a region of this machine. One that is not what its checksum says, or that
        goes meanwhile, is pulled again; raises Corrupt or RegionError where it never comes, and what asks
        raise. Then nothing is leased."""
        get = msgspec.structs.replace(get, copied=True)
        for attempt in range(1, TRIES + 1):
            try:
                return await self._pull(get)
            except (RegionError, RemoteError) as error:
                if attempt == TRIES or not of_region(error):
                    raise
        raise AssertionError("it was returned or raised")

    async def _pull(self, get: GetSnapshot) -> Snapshot:
        snapshot = await self._core.ask(get, timeout_s=LEASE_TIMEOUT_S)
        try:
            return await self._bring(snapshot)
        except BaseException as error:
            await self._release(snapshot)
            if isinstance(error, Exception):
                corrupt = isinstance(error, Corrupt)
                self.corrupt += corrupt
                event = "snapshot_corrupt" if corrupt else "snapshot_lost"
                log.warning(event, cell=get.cell, version=snapshot.version, reason=str(error))
            raise

    async def _bring(self, snapshot: Snapshot) -> Snapshot:
        # Of what it belongs to first: the next life frees it by that.
        name = f"{self.me.name}-{snapshot.region.name}-l{snapshot.lease}"
        assert snapshot.checksum is not None
        region = await self._lending.refresh(snapshot.region, self._core, name, snapshot.checksum)
        return msgspec.structs.replace(snapshot, region=region)

    async def free(self, snapshot: Snapshot) -> None:
        """It was pulled, and is loaded."""
        self._lending.free(snapshot.region)
        await self._release(snapshot)

    async def _release(self, snapshot: Snapshot) -> None:
        await self._core.tell(ReleaseSnapshot(lease=snapshot.lease))
