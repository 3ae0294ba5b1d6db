"""Bulk bytes between processes: memory that one side registers and others read, write, or map.

Weights, gradients and KV travel here, never in messages; a message carries the `RegionHandle`.
"""

from gyre.rdma.base import (
    Backend,
    Extent,
    Note,
    PeerLost,
    Refused,
    Region,
    RegionError,
    RegionHandle,
    Regions,
    Registration,
    TransferError,
    TransferTimeout,
)
from gyre.rdma.fetch import ReadRegion, fetch, read
from gyre.rdma.shm import SharedMemory

__all__ = [
    "Backend",
    "Extent",
    "Note",
    "PeerLost",
    "ReadRegion",
    "Refused",
    "Region",
    "RegionError",
    "RegionHandle",
    "Regions",
    "Registration",
    "SharedMemory",
    "TransferError",
    "TransferTimeout",
    "fetch",
    "read",
]
