"""KV of idle sessions in host memory, while the engine that it is of sleeps."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar
from uuid import uuid4

import structlog

from gyre.cell.engine.base import (
    KV_LEASE_S,
    SUM_BYTES,
    EngineFault,
    KvManifest,
    KvPart,
    KvRested,
    KvUnavailable,
    head_bytes,
)
from gyre.cell.engine.handover import KvStore, Pinned
from gyre.cell.engine.kv_home import KvHome
from gyre.cell.engine.kv_turns import Run
from gyre.cell.engine.unheard import unheard, wholly
from gyre.rdma import Arena, RegionError, RegionHandle, Registration
from gyre.rdma.memory import pointer

R = TypeVar("R")

# Copied between two looks at the clock.
STEP_BYTES = 32 * 2**20
_PROOF_BYTES = 8

log = structlog.get_logger()

Pin = Callable[[str, str], Awaitable[Pinned]]
Unpin = Callable[[Sequence[str]], Awaitable[None]]
Import = Callable[[KvManifest], Awaitable[int]]


class _Part(NamedTuple):
    """Of the KV heads that `rank` has; others may have them too."""

    heads: tuple[int, int]
    rank: int
    block_bytes: int
    memory: Arena


class _Lent(NamedTuple):
    session: str
    proof: Registration
    lease: asyncio.TimerHandle


class KvRest:
    """Of one engine, on its event loop: at most `limit_bytes`. Blocks are taken from the first on; the memory
    goes when no session is left and nobody here copies to or from it, but where a device has it locked.
    Whoever reads it compares the sums that blocks had in the pool."""

    def __init__(self, home: KvHome, store: KvStore, run: Run, limit_bytes: int, pool_blocks: int) -> None:
        self._home = home
        self._store = store
        self._run = run
        self._lock = store.page_lock
        self._limit_bytes = limit_bytes
        self._pool_blocks = pool_blocks
        self._parts: list[_Part] = []
        self._blocks = 0
        self._used = 0
        # The latest first; the blocks are those here.
        self._sessions: dict[str, Pinned] = {}
        # In how many of these each block is.
        self._resting: Counter[int] = Counter()
        # Held by who copies to or from the memory, and by who takes it away.
        self._turn = asyncio.Lock()
        self._taking = False
        self._given_up = False
        self._putting_back = False
        self.rested_tokens = 0
        self.put_back_tokens = 0
        self.dropped = 0
        self._registered: list[Registration] = []
        self._lent: dict[str, _Lent] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._expiring: set[asyncio.Task[bool]] = set()

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    @property
    def nbytes(self) -> int:
        """Of the sessions that rest."""
        return len(self._resting) * self._bytes_each

    def memory(self, region: RegionHandle) -> memoryview | None:
        """A view of its own, where a region is one of these."""
        for part in self._parts:
            if region.name in (part.memory.handle.name, self._name(part)):
                return part.memory.buffer[:]
        return None

    async def take(self, sessions: Sequence[str], budget_s: float, pin: Pin, unpin: Unpin) -> KvRested:
        """In place of what rests. Raises KvUnavailable, also where it is given up meanwhile, and RegionError
        where there is no memory for it."""
        deadline = asyncio.get_running_loop().time() + budget_s
        async with self._turn:
            self._taking, self._given_up = True, False
            pins: list[str] = []
            try:
                await self._drop()
                await self._take(sessions, deadline, pins, pin)
            except BaseException:
                await self._drop()
                raise
            finally:
                self._taking = False
                await unpin(pins)
            tokens = sum(len(pinned.tokens) // 4 for pinned in self._sessions.values())
            self.rested_tokens += tokens
            return KvRested(sessions=self.sessions, tokens=tokens, nbytes=self.nbytes)

    async def give_up(self) -> None:
        """The engine was to sleep and does not: nothing rests, and nothing more is taken."""
        # What goes back into the pool is on its way out.
        if not self._putting_back and (self._taking or self._sessions):
            await self.clear()

    async def settle(self) -> None:
        """The engine is about to sleep: whoever still takes is too late."""
        if self._taking:
            await self.clear()

    async def put_back(self, take_in: Import) -> None:
        """Into the pool, the latest session last: of cached blocks the oldest make room. Then nothing rests.
        Raises EngineFault; whatever else goes wrong with a session, it is computed again."""
        self._putting_back = True
        try:
            async with self._turn:
                try:
                    await self._prepare()
                    for session in reversed(self.sessions):
                        await self._put_back(session, take_in)
                finally:
                    await self._drop()
        finally:
            self._putting_back = False

    async def export(self, session: str, lease_s: float) -> KvManifest:
        """Raises KvUnavailable, RegionError."""
        found = self._sessions.get(session)
        if found is None:
            raise KvUnavailable(f"no KV of session {session} rests here")
        pin = f"pin-{uuid4().hex}"
        proof = await self._home.backend.allocate(f"{self._home.name}-{pin}", _PROOF_BYTES)
        if self._sessions.get(session) is not found:
            await proof.close()
            raise KvUnavailable(f"the KV of session {session} does not rest any more")
        lease = asyncio.get_running_loop().call_later(lease_s, self._expire, pin)
        self._lent[pin] = _Lent(session, proof, lease)
        return KvManifest(
            session=session,
            layout=found.layout,
            newest=found.newest,
            tokens=found.tokens,
            blocks=found.blocks,
            parts=tuple(
                KvPart(heads=part.heads, region=region, sums=sums)
                for part, region, sums in zip(self._parts, self._regions(), found.sums, strict=True)
            ),
            pin=pin,
            proof=proof.handle,
            lease_s=lease_s,
            resting=True,
        )

    async def release(self, pin: str) -> bool:
        """The session goes on elsewhere, with its KV or without. False where there is no such pin."""
        if (lent := self._lent.pop(pin, None)) is None:
            return False
        lent.lease.cancel()
        if (gone := self._sessions.pop(lent.session, None)) is not None:
            self._resting.subtract(gone.blocks)
            for block in gone.blocks:
                if not self._resting[block]:
                    del self._resting[block]
        await lent.proof.close()
        # Else whoever has the turn takes the memory away, or fills it.
        if not self._sessions and not self._turn.locked():
            await self.clear()
        return True

    async def clear(self) -> None:
        """Nothing rests, and whoever reads it is not told that it did."""
        self._given_up = True
        async with self._turn:
            await self._drop()

    async def _drop(self) -> None:
        """By who has the turn."""
        self._sessions.clear()
        self._resting.clear()
        lent, self._lent = self._lent, {}
        registered, self._registered = self._registered, []
        for one in lent.values():
            one.lease.cancel()
            await one.proof.close()
        for registration in registered:
            await registration.close()
        self._used = 0
        if self._lock is None and self._parts:
            parts, self._parts = self._parts, []
            for part in parts:
                part.memory.free()
            closing = asyncio.get_running_loop().run_in_executor(None, _close, parts)
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            closing.add_done_callback(unheard)

    async def close(self) -> None:
        """For good."""
        await self.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await asyncio.gather(*self._expiring, return_exceptions=True)
        await self._on_lane(self._free)

    # --- inside -----------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """What a device is to copy to is locked once, which takes a second for some GB; it stays."""
        if self._lock is not None:
            try:
                await self._on_lane(self._make)
            except (RegionError, KvUnavailable) as error:
                log.warning("kv_rest_has_no_memory", reason=str(error))

    async def _take(self, sessions: Sequence[str], deadline: float, pins: list[str], pin: Pin) -> None:
        clock = asyncio.get_running_loop().time
        known: dict[int, int] = {}
        await self._on_lane(self._make)
        for session in sessions:
            if clock() >= deadline or self._used == self._blocks:
                break
            pins.append(f"rest-{uuid4().hex}")
            # Else it has no full block.
            with contextlib.suppress(KvUnavailable):
                await self._copy(session, await pin(pins[-1], session), known, deadline)
            self._check_wanted()
        await self._register()
        self._check_wanted()

    def _check_wanted(self) -> None:
        if self._given_up:
            raise KvUnavailable("no KV is to rest any more: the engine goes on, or sleeps already")

    async def _put_back(self, session: str, take_in: Import) -> None:
        # Of one that was released meanwhile another engine has it.
        if session not in self._sessions:
            return
        try:
            self.put_back_tokens += await take_in(await self.export(session, KV_LEASE_S))
        except EngineFault:
            raise
        except Exception as error:
            self.dropped += 1
            expected = isinstance(error, KvUnavailable | RegionError)
            level = log.info if expected else log.warning
            level("kv_rest_dropped", execution=session, reason=str(error) if expected else repr(error))

    async def _copy(self, session: str, pinned: Pinned, known: dict[int, int], deadline: float) -> None:
        """From its first block on, as far as there is time and room. `known`: blocks of the pool that are
        here, and where."""
        new = [block for block in pinned.blocks if block not in known]
        clock = asyncio.get_running_loop().time
        step = max(STEP_BYTES // self._bytes_each, 1)
        while new and self._used < self._blocks and clock() < deadline and not self._given_up:
            some = new[: min(step, self._blocks - self._used)]
            try:
                await self._on_lane(partial(self._read, some, self._used))
            except RegionError as error:
                log.warning("kv_rest_has_no_memory", reason=str(error))
                self._blocks = self._used
                break
            known.update(zip(some, range(self._used, self._used + len(some)), strict=True))
            self._used += len(some)
            new = new[len(some) :]
        count = len(pinned.blocks) - len(new)
        if count:
            self._sessions[session] = pinned._replace(
                tokens=pinned.tokens[: count * len(pinned.tokens) // len(pinned.blocks)],
                blocks=tuple(known[block] for block in pinned.blocks[:count]),
                sums=tuple(pinned.sums[part.rank][: count * SUM_BYTES] for part in self._parts),
            )
            self._resting.update(self._sessions[session].blocks)

    async def _register(self) -> None:
        """For who is not on this host; others map the files."""
        if self._home.backend.name not in ("shm", "cuda_ipc"):
            for part in self._parts:
                register = self._home.backend.register(self._name(part), part.memory.buffer)
                self._registered.append(await register)

    def _regions(self) -> list[RegionHandle]:
        if self._registered:
            return [registration.handle for registration in self._registered]
        return [part.memory.handle for part in self._parts]

    def _name(self, part: _Part) -> str:
        return f"{self._home.name}-resting-{part.rank}"

    def _expire(self, pin: str) -> None:
        log.warning("kv_pin_expired", pin=pin)
        task = asyncio.get_running_loop().create_task(self.release(pin), name="expire a pin")
        self._expiring.add(task)
        task.add_done_callback(self._expiring.discard)
        task.add_done_callback(unheard)

    @property
    def _bytes_each(self) -> int:
        """Of a block, all heads."""
        return sum(part.block_bytes for part in self._parts)

    async def _on_lane(self, job: Callable[[], R]) -> R:
        """Cancelled, it returns when the job is over: that is at the memory."""
        return await wholly(asyncio.wrap_future(self._run(job)))

    # --- where the store belongs to ---------------------------------------------------------------

    def _make(self) -> None:
        """Memory for all blocks, mapped; there it is only when it is used, or locked."""
        layout, memories = self._store.kv_layout(0), self._store.kv_memory()
        ranks = {memory.heads: rank for rank, memory in reversed([*enumerate(memories)])}
        each = sum((last - first) * head_bytes(layout) for first, last in ranks)
        self._blocks = min(self._limit_bytes // each, self._pool_blocks)
        if self._parts or not self._blocks:
            return
        try:
            for heads, rank in sorted(ranks.items()):
                nbytes = (heads[1] - heads[0]) * head_bytes(layout)
                memory = Arena(self._home.shared, f"{self._home.name}-rest-{rank}", self._blocks * nbytes)
                self._parts.append(_Part(heads, rank, nbytes, memory))
                if self._lock is not None:
                    memory.grow(self._blocks * nbytes)
                    self._lock.lock(pointer(memory.buffer), self._blocks * nbytes)
        except BaseException:
            self._free()
            raise

    def _read(self, blocks: Sequence[int], first: int) -> None:
        for part in self._parts:
            start, stop = first * part.block_bytes, (first + len(blocks)) * part.block_bytes
            part.memory.grow(stop)
            self._store.read_kv(part.rank, blocks, part.memory.buffer[start:stop])

    def _free(self) -> None:
        for part in self._parts:
            if self._lock is not None:
                self._lock.unlock(pointer(part.memory.buffer))
            part.memory.free()
        _close(self._parts)
        self._parts = []


def _close(parts: Sequence[_Part]) -> None:
    for part in parts:
        part.memory.close()
