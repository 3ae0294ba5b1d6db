"""KV that comes by the stages of who gives it, slot after slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

from gyre.cell.engine.base import KvManifest, KvPart, KvUnavailable
from gyre.cell.engine.handover import KvStore, Reservation
from gyre.cell.engine.kv_home import KvHome, Pool, Step, block_bytes, compare, overlap, steps_of
from gyre.cell.engine.kv_relay import SLOTS_IN, SLOTS_OUT, KvRelay
from gyre.cell.engine.unheard import wholly
from gyre.rdma import Extent, HeldRegions, RegionError

R = TypeVar("R")


class Run(Protocol):
    """Has a job done where the store belongs to."""

    def __call__(self, job: Callable[[], R], /) -> Future[R]: ...


# Asked for in one note.
MOST_BLOCKS = 4096


class KvTurns:
    """Of one engine that has a stage, on the event loop of its backend."""

    def __init__(self, home: KvHome, store: KvStore, run: Run) -> None:
        self._home = home
        self._store = store
        self._run = run
        self.relay = KvRelay(home.backend, self._fill_slot, store.slot_blocks)
        self._free_in: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(SLOTS_OUT, SLOTS_OUT + SLOTS_IN):
            self._free_in.put_nowait(slot)
        self._held = HeldRegions(home.shared, store.page_lock)

    async def fetch(
        self, pools: Sequence[Pool], reservation: Reservation, meanwhile: Callable[[int], None]
    ) -> None:
        """Each slot is filled there while the one before is written here, and `meanwhile` done of as many
        blocks. Raises KvUnavailable, RegionError."""
        manifest = reservation.manifest
        widest = max(block_bytes(part, manifest.layout) for part in manifest.parts)
        most = min(manifest.slot_blocks, _slot_bytes(pools) // widest, MOST_BLOCKS)
        if most < 1:
            raise KvUnavailable(f"a block of {widest} bytes is too large for a slot of its stage here")
        turns = asyncio.Semaphore(SLOTS_IN)
        async with AsyncExitStack() as files:
            held = {part.region.name: await self._open(files, part) for part in manifest.parts}
            try:
                async with asyncio.TaskGroup() as group:
                    for step in steps_of(reservation, most):
                        group.create_task(self._take(step, pools, manifest, held, turns, meanwhile))
            except* (RegionError, KvUnavailable) as errors:
                raise errors.exceptions[0] from None

    async def end(self) -> None:
        """For good: until then whoever asks is told that nothing is pinned."""
        await self.relay.close()
        await self._on_lane(self._held.close)

    def _fill_slot(self, blocks: Sequence[int], slot: int) -> Future[None]:
        return self._run(partial(self._store.fill_slot, blocks, slot))

    async def _take(
        self,
        step: Step,
        pools: Sequence[Pool],
        manifest: KvManifest,
        held: Mapping[str, memoryview | None],
        turns: asyncio.Semaphore,
        meanwhile: Callable[[int], None],
    ) -> None:
        async with turns, self.relay.turn(manifest, step.theirs) as slot:
            for part in manifest.parts:
                nbytes = block_bytes(part, manifest.layout)
                where = Extent(0, slot * manifest.slot_blocks * nbytes, len(step.own) * nbytes)
                async with self._found(pools, part, where, held[part.region.name]) as source:
                    for rank, pool in enumerate(pools):
                        if overlap(part.heads, pool.heads):
                            writing = self._run(partial(self._write, rank, part, step, source))
                            await wholly(asyncio.wrap_future(writing))
        self._run(partial(meanwhile, len(step.own)))

    @asynccontextmanager
    async def _found(
        self, pools: Sequence[Pool], part: KvPart, where: Extent, held: memoryview | None
    ) -> AsyncIterator[memoryview]:
        """Bytes of a stage of theirs: where they are, on this host, else read into a slot of ours."""
        _, start, nbytes = where
        if start < 0 or start + nbytes > part.region.nbytes:
            raise KvUnavailable(f"region {part.region.name} has no {nbytes} bytes at {start}")
        if held is not None:
            with held[start : start + nbytes] as source:
                yield source
            return
        slot = await self._free_in.get()
        try:
            stage, at = pools[0].local, slot * _slot_bytes(pools)
            await self._home.backend.read(stage, part.region, [Extent(at, start, nbytes)])
            yield stage.buffer[at : at + nbytes]
        finally:
            self._free_in.put_nowait(slot)

    def _write(self, rank: int, part: KvPart, step: Step, source: memoryview) -> None:
        compare(self._store.write_kv(rank, step.own, part.heads, source), step, part)

    async def _open(self, files: AsyncExitStack, part: KvPart) -> memoryview | None:
        """A stage of this host, mapped and page-locked once. Raises RegionError."""
        if part.region.peer:
            return None
        return files.enter_context(await self._on_lane(partial(self._held.open, part.region))).buffer

    async def _on_lane(self, job: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._run(job))


def _slot_bytes(pools: Sequence[Pool]) -> int:
    return pools[0].local.handle.nbytes // (SLOTS_OUT + SLOTS_IN)
