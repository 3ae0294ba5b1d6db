"""How weights come to the ranks of a cell: leased from the core, loaded, released."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from gyre.actors import RemoteError
from gyre.actors.errors import error_name
from gyre.cell.messages import Snapshot, SnapshotKind
from gyre.cell.ranks import AskRanks
from gyre.cell.worker_messages import BeginTraining
from gyre.rdma import RegionError

log = structlog.get_logger()

PULL_TIMEOUT_S = 60.0


class WeightSource(Protocol):
    """The core, or a satellite."""

    async def lease(self, kind: SnapshotKind) -> Snapshot:
        """The newest of that kind, in a region of this machine, until `release`."""

    async def release(self, snapshot: Snapshot) -> None: ...


async def pull(weights: WeightSource, kind: SnapshotKind, timeout_s: float = PULL_TIMEOUT_S) -> Snapshot:
    """As `lease`; raises TimeoutError."""
    try:
        async with asyncio.timeout(timeout_s):
            return await weights.lease(kind)
    except TimeoutError:
        raise TimeoutError(f"the core gave no weights within {timeout_s:g} s") from None


async def load_training(weights: WeightSource, ranks: AskRanks) -> int:
    """Has the ranks load the training snapshot, and once more if it went while they read it: a lease may be
    ended. Answers its version."""
    for last in (False, True):
        snapshot = await pull(weights, "training")
        try:
            await ranks(BeginTraining(version=snapshot.version, region=snapshot.region))
            return snapshot.version
        except (RegionError, RemoteError) as error:
            if last or not of_region(error):
                raise
            log.warning("snapshot_lost", version=snapshot.version, reason=str(error))
        finally:
            await weights.release(snapshot)
    raise AssertionError("it was returned or raised")


def of_region(error: Exception) -> bool:
    """Whether it is a RegionError, here or where it was asked for."""
    there = isinstance(error, RemoteError) and error.type_name == error_name(RegionError)
    return there or isinstance(error, RegionError)
