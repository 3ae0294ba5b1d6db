"""The pools of an engine as memory that others read, and reads of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from uuid import uuid4

import structlog

from gyre.cell.engine.base import KvManifest, KvPart, KvUnavailable
from gyre.cell.engine.handover import KvMemory, KvStore, Reservation
from gyre.cell.engine.kv_home import KvHome, Pool, Step, block_bytes, compare, overlap, steps_of
from gyre.cell.engine.kv_sums import BlockSums
from gyre.cell.engine.kv_turns import KvTurns, Run
from gyre.cell.engine.unheard import wholly
from gyre.rdma import Extent, Region, RegionError, RegionHandle, Registration

Check = Callable[[], None]

log = structlog.get_logger()

# Looked at while what comes next is read. Between GPUs a turn of the event loop is long.
STEP_BYTES = 32 * 2**20
GPU_STEP_BYTES = 2**30
# So that the next one is there when one is read.
_ABREAST = 3
_PROOF_BYTES = 8


class KvMoves:
    """On the event loop of the backend."""

    def __init__(
        self,
        home: KvHome,
        store: KvStore,
        run: Run,
        own_rest: Callable[[RegionHandle], memoryview | None],
    ) -> None:
        """`own_rest`: where a region is of what rests here."""
        self._own_rest = own_rest
        self._home = home
        self._backend = home.backend
        self._store = store
        self._run = run
        self._on_host = home.backend.name != "cuda_ipc"
        self._step_bytes = STEP_BYTES if self._on_host else GPU_STEP_BYTES
        self._pools: list[Pool] = []
        self._proofs: dict[str, Registration] = {}
        self._scratch: Registration | None = None
        self._turns: KvTurns | None = None

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
                self._pools.append(Pool(heads, local, mapped or local.handle))
            if self._turns is None and self._store.slot_blocks:
                self._turns = KvTurns(self._home, self._store, self._run)
        except BaseException:
            await self.close()
            raise

    async def end(self) -> None:
        """After `close`, for good."""
        if self._turns is not None:
            await self._turns.end()

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

    @property
    def life(self) -> object:
        """Another one after each `close`. Raises KvUnavailable where nothing is registered."""
        return self._opened()

    async def prove(self, pin: str, blocks: Sequence[int], life: object) -> RegionHandle:
        """What can be read as long as the pin, of these blocks in that `life`, is held. Raises RegionError,
        KvUnavailable where it is over."""
        try:
            if self._turns is not None:
                self._turns.relay.give(pin, blocks)
            proof = await self._backend.allocate(f"{self._home.name}-{pin}", _PROOF_BYTES)
            self._proofs[pin] = proof
            if self._pools is not life:
                raise KvUnavailable("the engine fell asleep meanwhile")
            return proof.handle
        except BaseException:
            await self.disprove(pin)
            raise

    async def disprove(self, pin: str) -> bool:
        """False where there was nothing to be read any more."""
        if self._turns is not None:
            self._turns.relay.end(pin)
        proof = self._proofs.pop(pin, None)
        if proof is not None:
            await proof.close()
        return proof is not None

    @property
    def slot_blocks(self) -> int:
        """Of its parts; 0 where they are pools."""
        return self._store.slot_blocks

    def parts(self, sums: Sequence[bytes]) -> tuple[KvPart, ...]:
        """Each head once: ranks may hold the same one. `sums` of the blocks by rank."""
        held = zip(self._pools, sums, strict=True)
        return tuple(
            {p.heads: KvPart(heads=p.heads, region=p.handle, sums=known) for p, known in held}.values()
        )

    # --- taking -----------------------------------------------------------------------------------

    async def fetch(self, reservation: Reservation, meanwhile: Callable[[int], None]) -> Check:
        """Fills its blocks at all ranks. What it answers is to be done where the store belongs to, before any
        is findable, and may raise KvUnavailable. `meanwhile` is called there of some blocks at a time, not
        of all at once: who copies waits for the interpreter. Raises KvUnavailable, RegionError."""
        pools = self._opened()
        try:
            async with asyncio.timeout(reservation.manifest.lease_s):
                return await self._fill(pools, reservation, meanwhile)
        except TimeoutError:
            why = f"not read within its lease of {reservation.manifest.lease_s:g} s"
            raise KvUnavailable(why) from None

    async def _fill(
        self, pools: Sequence[Pool], reservation: Reservation, meanwhile: Callable[[int], None]
    ) -> Check:
        manifest = reservation.manifest
        looks: list[Future[None]] = []
        if not reservation.own:
            return partial(_settled, looks)
        if self._turns is not None and manifest.slot_blocks:
            await self._turns.fetch(pools, reservation, meanwhile)
            return await self._proved(manifest, looks)
        if manifest.slot_blocks or (self._turns is not None and not manifest.resting):
            raise KvUnavailable("one of the two engines has a stage for its KV and the other has none")
        with ExitStack() as files:
            for part in manifest.parts:
                source = self._at_hand(files, part) if manifest.resting else None
                for rank, pool in enumerate(pools):
                    if not overlap(part.heads, pool.heads):
                        continue
                    if source is not None:
                        await self._from_host(rank, part, source, reservation, meanwhile)
                    elif part.heads == pool.heads and self._turns is None:
                        looks += await self._straight(rank, pool, part, reservation, meanwhile)
                    else:
                        await self._by_staging(rank, part, reservation, meanwhile)
        return await self._proved(manifest, looks)

    async def _proved(self, manifest: KvManifest, looks: Sequence[Future[None]]) -> Check:
        """What was read counts only if it was pinned until now."""
        assert self._scratch is not None
        await self._backend.read(self._scratch, manifest.proof, [Extent(0, 0, _PROOF_BYTES)])
        return partial(_settled, looks)

    async def _straight(
        self,
        rank: int,
        pool: Pool,
        part: KvPart,
        reservation: Reservation,
        meanwhile: Callable[[int], None],
    ) -> list[Future[None]]:
        """Into the pool. What is not looked at as it arrives is afterwards, and nobody waits for that here:
        it may take a pass."""
        nbytes = block_bytes(part, reservation.manifest.layout)
        turns = asyncio.Semaphore(_ABREAST)
        looks: list[Future[None]] = []

        async def read(step: Step) -> None:
            sums = BlockSums(pool.local.buffer, nbytes, step.own) if self._on_host else None
            extents = list(_extents(step, nbytes))
            async with turns:
                look = sums.look if sums is not None else None
                await self._backend.read(pool.local, part.region, extents, look=look)
            if sums is not None:
                compare(sums.taken(), step, part)
            self._run(partial(meanwhile, len(step.own)))
            if sums is None:
                looks.append(self._run(partial(self._look, rank, part, step)))

        steps = steps_of(reservation, max(self._step_bytes // nbytes, 1))
        try:
            async with asyncio.TaskGroup() as group:
                for step in steps:
                    group.create_task(read(step))
        except* (RegionError, KvUnavailable) as errors:
            raise errors.exceptions[0] from None
        return looks

    def _at_hand(self, files: ExitStack, part: KvPart) -> memoryview | None:
        """KV that rests in this process, or on this host where the pool is not: what is of a GPU does not go
        by the backend. Raises RegionError."""
        own = self._own_rest(part.region)
        if own is not None:
            return files.enter_context(own)
        if part.region.peer or (self._turns is None and self._backend.name == "shm"):
            return None
        region = self._home.shared.open(part.region)
        # Else it ends with the last view of it.
        files.callback(_close, region)
        return region.buffer

    async def _from_host(
        self,
        rank: int,
        part: KvPart,
        source: memoryview,
        reservation: Reservation,
        meanwhile: Callable[[int], None],
    ) -> None:
        nbytes = block_bytes(part, reservation.manifest.layout)
        for whole in steps_of(reservation, max(self._step_bytes // nbytes, 1)):
            for step in _in_a_row(whole):
                start = step.theirs[0] * nbytes
                bytes_of_step = source[start : start + len(step.own) * nbytes]
                writing = self._run(partial(self._write, rank, part, step, bytes_of_step))
                await wholly(asyncio.wrap_future(writing))
            self._run(partial(meanwhile, len(whole.own)))

    async def _by_staging(
        self, rank: int, part: KvPart, reservation: Reservation, meanwhile: Callable[[int], None]
    ) -> None:
        """Where this rank has other heads than the part."""
        nbytes = block_bytes(part, reservation.manifest.layout)
        blocks = min(len(reservation.own), max(STEP_BYTES // nbytes, 1))
        async with self._staging(blocks * nbytes) as staging:
            for step in steps_of(reservation, blocks):
                places = enumerate(step.theirs)
                extents = [Extent(at * nbytes, theirs * nbytes, nbytes) for at, theirs in places]
                await self._backend.read(staging, part.region, extents)
                source = staging.buffer[: len(step.own) * nbytes]
                await self._on_lane(partial(self._write, rank, part, step, source))
                self._run(partial(meanwhile, len(step.own)))

    def _look(self, rank: int, part: KvPart, step: Step) -> None:
        compare(self._store.sums(rank, step.own), step, part)

    def _write(self, rank: int, part: KvPart, step: Step, source: memoryview) -> None:
        compare(self._store.write_kv(rank, step.own, part.heads, source), step, part)

    @asynccontextmanager
    async def _staging(self, nbytes: int) -> AsyncIterator[Registration]:
        if not self._on_host:
            raise KvUnavailable("KV of other heads is not moved from GPU to GPU")
        async with AsyncExitStack() as stack:
            staging = await self._backend.allocate(f"{self._home.name}-{uuid4().hex[:12]}", nbytes)
            stack.push_async_callback(staging.close)
            yield staging

    async def _on_lane(self, job: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._run(job))

    def _opened(self) -> list[Pool]:
        if not self._pools:
            raise KvUnavailable("the engine's KV is not registered")
        return self._pools


def _extents(step: Step, nbytes: int) -> Iterator[Extent]:
    """Those that follow one another here and there are one."""
    own, theirs, _ = step
    first = 0
    for at in range(1, len(own) + 1):
        count = at - first
        if at == len(own) or own[at] != own[first] + count or theirs[at] != theirs[first] + count:
            yield Extent(own[first] * nbytes, theirs[first] * nbytes, count * nbytes)
            first = at


def _in_a_row(step: Step) -> Iterator[Step]:
    """Parts of it whose blocks follow one another there."""
    own, theirs, number = step
    first = 0
    for at in range(1, len(own) + 1):
        if at == len(own) or theirs[at] != theirs[at - 1] + 1:
            yield Step(own[first:at], theirs[first:at], number + first)
            first = at


def _close(region: Region) -> None:
    with suppress(BufferError):
        region.close()


def _settled(looks: Sequence[Future[None]]) -> None:
    """All were asked for before this."""
    for look in looks:
        look.result()
