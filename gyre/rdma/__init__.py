"""Bulk bytes between processes: regions that one side allocates and fills and others read.

Weights, gradients and KV travel here, never in messages; a message carries the `RegionHandle`.
"""

from gyre.rdma.base import Backend, Region, RegionError, RegionHandle
from gyre.rdma.fetch import ReadRegion, fetch, read
from gyre.rdma.shm import SharedMemory

__all__ = ["Backend", "ReadRegion", "Region", "RegionError", "RegionHandle", "SharedMemory", "fetch", "read"]
