"""Weights and gradients as flat bytes: where each parameter, or a rank's rows of it, lies in a region."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre.rdma import RegionHandle, Regions

ALIGN_BYTES = 64


class Slot(NamedTuple):
    """One parameter in a region of whole weights: full `shape`, byte `offset`; `rows` of it are ours."""

    shape: tuple[int, ...]
    offset: int
    rows: tuple[int, int]


class Layout:
    """Parameters in the module's order, whole. Rank r of R holds rows [r * ceil(n / R), ...) of each, as
    FSDP2 shards dimension 0; all cells have the same layout, so shard r of one is shard r of another."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, rank: int, ranks: int) -> None:
        self.dtype = dtype
        self.slots: list[Slot] = []
        offset = 0
        for shape in shapes:
            step = -(-shape[0] // ranks)
            rows = (min(rank * step, shape[0]), min((rank + 1) * step, shape[0]))
            self.slots.append(Slot(shape, offset, rows))
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            offset += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        self.nbytes = offset

    def views(self, buffer: memoryview) -> list[Tensor]:
        """The whole parameters in `buffer`, not copied."""
        return [self._view(buffer, slot) for slot in self.slots]

    def shards(self, buffer: memoryview) -> list[Tensor]:
        """This rank's rows of each, not copied."""
        return [self._view(buffer, slot)[slot.rows[0] : slot.rows[1]] for slot in self.slots]

    def _view(self, buffer: memoryview, slot: Slot) -> Tensor:
        count = torch.Size(slot.shape).numel()
        if count == 0:
            return torch.empty(slot.shape, dtype=self.dtype)
        flat = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=slot.offset)
        return flat.view(slot.shape)


class RegionWeights:
    """Weights that lie in a region, for an engine (see engine/base.py)."""

    def __init__(
        self, version: int, names: Sequence[str], layout: Layout, backend: Regions, region: RegionHandle
    ) -> None:
        self.version = version
        self.region = region
        self._names = names
        self._layout = layout
        self._backend = backend

    @contextmanager
    def open(self) -> Iterator[Mapping[str, Tensor]]:
        with self._backend.open(self.region) as source:
            views = dict(zip(self._names, self._layout.views(source.buffer), strict=True))
            yield views
            views.clear()  # a region closes only when nothing views it


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """In the order of every layout; tied ones once."""
    return [parameter for _, parameter in model.named_parameters()]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Whole shapes, sharded or not."""
    return [tuple(parameter.shape) for parameter in parameters(model)]


@torch.no_grad()
def fill(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copies tensor by tensor, across devices and dtypes. A GPU is waited for once: a wait for each tensor
    takes longer than its copy from pinned memory."""
    gpus: set[torch.device] = set()
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
        gpus |= {tensor.device for tensor in (target, source) if tensor.is_cuda}
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()


def checksum(buffer: memoryview) -> int:
    """crc32 of the bytes of a region."""
    return zlib.crc32(buffer)
