"""What the ways can be at most: copies between memory that is mapped and pinned, and NCCL's broadcast."""

from __future__ import annotations

from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from gyre.cell.page_lock import page_lock
from gyre.rdma import HeldRegions, SharedMemory

# More than any cache has.
MOST_BYTES = 256 * 2**20
TIMEOUT = timedelta(seconds=300)


class RawCopy:
    """From one region to another, or between one and a GPU, again and again: as many bytes as `nbytes`, so
    that it takes as long as what is beside it. Answers the seconds."""

    def __init__(self, shared: SharedMemory, name: str, nbytes: int, device: torch.device) -> None:
        part = min(nbytes, MOST_BYTES)
        self._times = round(nbytes / part)
        self._scale = nbytes / part / self._times
        self._device = device
        held = HeldRegions(shared, page_lock(device))
        self._host = [held.allocate(f"{name}-{number}", part) for number in range(2)]
        for region in self._host:
            region.buffer[:] = b"\x01" * part
        self._gpu = None
        if device.type == "cuda":
            self._gpu = torch.zeros(part, dtype=torch.uint8, device=device)

    def from_host(self) -> float:
        """To another place of the host, or to the GPU."""
        return self._copy(to_gpu=True)

    def to_host(self) -> float:
        return self._copy(to_gpu=False)

    def _copy(self, *, to_gpu: bool) -> float:
        if self._gpu is None:
            began = perf_counter()
            for _ in range(self._times):
                self._host[0].buffer[:] = self._host[1].buffer
            return (perf_counter() - began) * self._scale
        host = torch.frombuffer(self._host[0].buffer, dtype=torch.uint8)
        torch.cuda.synchronize(self._device)
        began = perf_counter()
        for _ in range(self._times):
            if to_gpu:
                self._gpu.copy_(host)
            else:
                host.copy_(self._gpu)
        torch.cuda.synchronize(self._device)
        return (perf_counter() - began) * self._scale


def store(world: int, port: int = 0) -> Any:
    """Where the processes meet; of rank 0 without a `port`."""
    first = port == 0
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, world, is_master=first, wait_for_workers=False, timeout=TIMEOUT
    )


class Broadcast:
    """Of `nbytes` from rank 0 to all GPUs."""

    def __init__(self, store: Any, rank: int, world: int, device: torch.device, nbytes: int) -> None:
        """Returns when all have come."""
        self._device = device
        self._data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=world, timeout=TIMEOUT, device_id=device
        )
        self.run()

    def run(self) -> float:
        """Seconds from where all are ready."""
        dist.barrier(device_ids=[self._device.index])
        torch.cuda.synchronize(self._device)
        began = perf_counter()
        dist.broadcast(self._data, 0)
        torch.cuda.synchronize(self._device)
        return perf_counter() - began

    def close(self) -> None:
        dist.destroy_process_group()
