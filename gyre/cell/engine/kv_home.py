"""Where the KV of an engine lies, and by what others read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gyre.cell.engine.base import SUM_BYTES, KvLayout, KvPart, KvUnavailable, head_bytes
from gyre.cell.engine.handover import Reservation
from gyre.rdma import Backend, RegionHandle, Registration, SharedMemory


class PoolFile(NamedTuple):
    """Where a rank's pool is to lie: a region of that name, in memory of this host. With `slot_bytes` it lies
    elsewhere, and its stage is there, of slots of about so many bytes."""

    shared: SharedMemory
    name: str
    slot_bytes: int = 0


class KvHome(NamedTuple):
    """By what an engine hands its KV over, and where that lies: the pool of rank 0, or with `slot_bytes` its
    stage, is the region `name`. Engines with stages share no backend."""

    backend: Backend
    shared: SharedMemory
    name: str
    slot_bytes: int = 0

    @property
    def file(self) -> PoolFile | None:
        """None where KV goes from GPU to GPU."""
        if self.backend.name == "cuda_ipc":
            return None
        return PoolFile(self.shared, self.name, self.slot_bytes)


class Pool(NamedTuple):
    """Of one rank: `local` is what is read into, `handle` what others read."""

    heads: tuple[int, int]
    local: Registration
    handle: RegionHandle


class Step(NamedTuple):
    """Blocks that are read together, theirs into own ones. The first is number `first` of its manifest."""

    own: Sequence[int]
    theirs: Sequence[int]
    first: int


def steps_of(reservation: Reservation, blocks: int) -> Iterator[Step]:
    """What is reserved, at most so many blocks at a time."""
    own, theirs, held = reservation.own, reservation.theirs, len(reservation.chain)
    for at in range(0, len(own), blocks):
        yield Step(own[at : at + blocks], theirs[at : at + blocks], held + at)


def block_bytes(part: KvPart, layout: KvLayout) -> int:
    """Of a block of its heads."""
    return (part.heads[1] - part.heads[0]) * head_bytes(layout)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Of heads."""
    return one[0] < other[1] and other[0] < one[1]


def compare(sums: bytes, step: Step, part: KvPart) -> None:
    """With those of the blocks when they were pinned. Raises KvUnavailable."""
    known = part.sums[step.first * SUM_BYTES : (step.first + len(step.own)) * SUM_BYTES]
    if sums != known:
        read, pinned = (memoryview(found).cast("q") for found in (sums, known))
        wrong = [block for at, block in enumerate(step.theirs) if read[at] != pinned[at]]
        raise KvUnavailable(f"region {part.region.name} had other bytes in its blocks {wrong} when pinned")
