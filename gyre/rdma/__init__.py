"""Bulk bytes between processes: memory that one side registers and others read, write, or map.

Weights, gradients and KV travel here, never in messages; a message carries the `RegionHandle`.
"""

from gyre.rdma.arena import Arena
from gyre.rdma.base import (
    Backend,
    Extent,
    Look,
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
    Unusable,
)
from gyre.rdma.held import HeldRegions, PageLock
from gyre.rdma.lending import Borrow, Corrupt, Lending
from gyre.rdma.page_sums import page_sum
from gyre.rdma.probing import BACKENDS, BackendName, Probe, make_backend, probe, start_backend
from gyre.rdma.shm import SharedMemory

__all__ = [
    "BACKENDS",
    "Arena",
    "Backend",
    "BackendName",
    "Borrow",
    "Corrupt",
    "Extent",
    "HeldRegions",
    "Lending",
    "Look",
    "Note",
    "PageLock",
    "PeerLost",
    "Probe",
    "Refused",
    "Region",
    "RegionError",
    "RegionHandle",
    "Regions",
    "Registration",
    "SharedMemory",
    "TransferError",
    "TransferTimeout",
    "Unusable",
    "make_backend",
    "page_sum",
    "probe",
    "start_backend",
]
