"""The process group of one cell, torn down and rebuilt at each role change."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh


class CellGroup:
    """At most one group stands at a time: gloo on CPU, NCCL on GPU."""

    def __init__(self, rank: int, ranks: int, device: torch.device, timeout_s: float) -> None:
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)

    def rebuild(self, host: str, port: int, prefix: str) -> None:
        """Drops the group that stands and meets the other ranks under `prefix` of the store. Blocks."""
        self.drop()
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=self.store(host, port, prefix),
            rank=self._rank,
            world_size=self._ranks,
            timeout=self._timeout,
            device_id=self._device if self._device.type == "cuda" else None,
        )

    def store(self, host: str, port: int, prefix: str) -> Store:
        """Where ranks find each other."""
        return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=self._timeout))

    def drop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def mesh(self) -> DeviceMesh | None:
        """Over the cell's ranks; None where there is one rank and nothing to shard."""
        if self._ranks == 1:
            return None
        return DeviceMesh(self._device.type, list(range(self._ranks)))

    def sum(self, value: float) -> float:
        """Of one number over the ranks, in float64."""
        if self._ranks == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return float(total)
