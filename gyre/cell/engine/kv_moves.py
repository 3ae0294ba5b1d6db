"""The pools of an engine as memory that others read, and reads of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import NamedTuple
from uuid import uuid4

import structlog

from gyre.cell.engine.base import SUM_BYTES, KvLayout, KvPart, KvUnavailable, head_bytes
from gyre.cell.engine.handover import KvMemory, KvStore, Reservation
from gyre.rdma import Backend, Extent, RegionHandle, Registration, SharedMemory

# Has a job done where the store belongs to.
Run = Callable[[Callable[[], None]], Future[None]]
Check = Callable[[], None]

log = structlog.get_logger()

# Read while what came before is looked at.
STEP_BYTES = 16 * 2**20
_PROOF_BYTES = 8


class PoolFile(NamedTuple):
    """Where a rank's pool is to lie: a region of that name, in memory of this host."""

    shared: SharedMemory
    name: str


class KvHome(NamedTuple):
    """By what an engine hands its KV over, and where that lies: the pool of rank 0 is the region `name`."""

    backend: Backend
    shared: SharedMemory
    name: str

    @property
    def file(self) -> PoolFile | None:
        """None where KV goes from GPU to GPU."""
        return None if self.backend.name == "cuda_ipc" else PoolFile(self.shared, self.name)


class _Pool(NamedTuple):
    """Of one rank: `local` is what is read into, `handle` what others read."""

    heads: tuple[int, int]
    local: Registration
    handle: RegionHandle


class _Step(NamedTuple):
    """Blocks that are read together, and the sums of what they are to hold."""

    own: Sequence[int]
    theirs: Sequence[int]
    sums: bytes


class KvMoves:
    """On the event loop of the backend."""

    def __init__(self, home: KvHome, store: KvStore, run: Run) -> None:
        self._home = home
        self._backend = home.backend
        self._store = store
        self._run = run
        self._pools: list[_Pool] = []
        self._proofs: dict[str, Registration] = {}
        self._scratch: Registration | None = None

    async def open(self, memories: Sequence[KvMemory]) -> None:
        """Registers them. Raises RegionError; then none is."""
        life = uuid4().hex[:12]
        try:
            self._scratch = await self._backend.allocate(f"{self._home.name}-{life}-s", _PROOF_BYTES)
            for rank, (heads, memory, file) in enumerate(memories):
                name = f"{self._home.name}-{life}-{rank}"
                local = await self._backend.register(name, memory)
                # Who is on this host maps the file, without asking this process for each byte.
                mapped = file if self._backend.name == "shm" else None
                self._pools.append(_Pool(heads, local, mapped or local.handle))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Nobody reads any more, and what was read and not proved does not count."""
        for pin in tuple(self._proofs):
            await self.disprove(pin)
        pools, self._pools = self._pools, []
        for pool in pools:
            await pool.local.close()
        if self._scratch is not None:
            scratch, self._scratch = self._scratch, None
            await scratch.close()

    # --- giving -----------------------------------------------------------------------------------

    async def prove(self, pin: str) -> RegionHandle:
        """What can be read as long as the pin is held. Raises RegionError."""
        self._opened()
        proof = self._proofs[pin] = await self._backend.allocate(pin, _PROOF_BYTES)
        return proof.handle

    async def disprove(self, pin: str) -> bool:
        """False where there was nothing to be read any more."""
        proof = self._proofs.pop(pin, None)
        if proof is not None:
            await proof.close()
        return proof is not None

    def parts(self, sums: Sequence[bytes]) -> tuple[KvPart, ...]:
        """Each head once: ranks may hold the same one. `sums` of the blocks by rank."""
        held = zip(self._pools, sums, strict=True)
        return tuple(
            {p.heads: KvPart(heads=p.heads, region=p.handle, sums=known) for p, known in held}.values()
        )

    # --- taking -----------------------------------------------------------------------------------

    async def fetch(self, reservation: Reservation) -> Check:
        """Fills its blocks at all ranks. What it answers is to be done where the store belongs to, before any
        is findable, and may raise KvUnavailable. Raises KvUnavailable, RegionError."""
        pools = self._opened()
        try:
            async with asyncio.timeout(reservation.manifest.lease_s):
                return await self._fill(pools, reservation)
        except TimeoutError:
            why = f"not read within its lease of {reservation.manifest.lease_s:g} s"
            raise KvUnavailable(why) from None

    async def _fill(self, pools: Sequence[_Pool], reservation: Reservation) -> Check:
        manifest = reservation.manifest
        check: Check = _nothing
        if not reservation.own:
            return check
        for rank, pool in enumerate(pools):
            for part in manifest.parts:
                if part.heads == pool.heads:
                    check = await self._straight(rank, pool, part, reservation, check)
                elif part.heads[0] < pool.heads[1] and pool.heads[0] < part.heads[1]:
                    await self._by_staging(rank, part, reservation)
        # What was read counts only if it was pinned until now.
        assert self._scratch is not None
        await self._backend.read(self._scratch, manifest.proof, [Extent(0, 0, _PROOF_BYTES)])
        return check

    async def _straight(
        self,
        rank: int,
        pool: _Pool,
        part: KvPart,
        reservation: Reservation,
        check: Check,
    ) -> Check:
        """Into the pool; each step is looked at while the next one is read, the last one by whom it answers
        to: a job of its own would wait for a pass."""
        nbytes = _block_bytes(part, reservation.manifest.layout)
        for step in _steps(reservation, part, nbytes):
            pairs = zip(step.own, step.theirs, strict=True)
            extents = [Extent(own * nbytes, theirs * nbytes, nbytes) for own, theirs in pairs]
            reading = self._backend.read(pool.local, part.region, extents)
            if check is _nothing:
                await reading
            else:
                await asyncio.gather(reading, self._on_lane(check))
            check = partial(self._look, rank, part, step)
        return check

    async def _by_staging(self, rank: int, part: KvPart, reservation: Reservation) -> None:
        """Where this rank has other heads than the part."""
        nbytes = _block_bytes(part, reservation.manifest.layout)
        blocks = min(len(reservation.own), max(STEP_BYTES // nbytes, 1))
        async with self._staging(blocks * nbytes) as staging:
            for step in _steps(reservation, part, nbytes):
                places = enumerate(step.theirs)
                extents = [Extent(at * nbytes, theirs * nbytes, nbytes) for at, theirs in places]
                await self._backend.read(staging, part.region, extents)
                source = staging.buffer[: len(step.own) * nbytes]
                await self._on_lane(partial(self._write, rank, part, step, source))

    def _look(self, rank: int, part: KvPart, step: _Step) -> None:
        _compare(self._store.sums(rank, step.own), step, part)

    def _write(self, rank: int, part: KvPart, step: _Step, source: memoryview) -> None:
        _compare(self._store.write_kv(rank, step.own, part.heads, source), step, part)

    @asynccontextmanager
    async def _staging(self, nbytes: int) -> AsyncIterator[Registration]:
        if self._backend.name == "cuda_ipc":
            raise KvUnavailable("KV of other heads is not moved from GPU to GPU")
        async with AsyncExitStack() as stack:
            staging = await self._backend.allocate(f"{self._home.name}-{uuid4().hex[:12]}", nbytes)
            stack.push_async_callback(staging.close)
            yield staging

    async def _on_lane(self, job: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._run(job))

    def _opened(self) -> list[_Pool]:
        if not self._pools:
            raise KvUnavailable("the engine's KV is not registered")
        return self._pools


def _block_bytes(part: KvPart, layout: KvLayout) -> int:
    return (part.heads[1] - part.heads[0]) * head_bytes(layout)


def _steps(reservation: Reservation, part: KvPart, nbytes: int) -> Iterator[_Step]:
    count = max(STEP_BYTES // nbytes, 1)
    own, theirs = reservation.own, reservation.theirs
    sums = part.sums[len(reservation.chain) * SUM_BYTES :]
    for at in range(0, len(own), count):
        end = min(at + count, len(own))
        yield _Step(own[at:end], theirs[at:end], sums[at * SUM_BYTES : end * SUM_BYTES])


def _nothing() -> None:
    """Nothing is left to be looked at."""


def _compare(sums: bytes, step: _Step, part: KvPart) -> None:
    if sums != step.sums:
        read, pinned = (memoryview(found).cast("q") for found in (sums, step.sums))
        wrong = [block for at, block in enumerate(step.theirs) if read[at] != pinned[at]]
        raise KvUnavailable(f"region {part.region.name} had other bytes in its blocks {wrong} when pinned")
