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
    Unusable,
)
from gyre.rdma.lending import Borrow, Lending
from gyre.rdma.probing import BACKENDS, BackendName, Probe, make_backend, probe, start_backend
from gyre.rdma.shm import SharedMemory

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendName",
    "Borrow",
    "Extent",
    "Lending",
    "Note",
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
    "probe",
    "start_backend",
]
