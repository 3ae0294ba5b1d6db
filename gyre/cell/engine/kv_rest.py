"""KV of idle sessions in host memory, while the engine that it is of sleeps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar
from uuid import uuid4

import structlog

from gyre.cell.engine.base import (
    SUM_BYTES,
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
    goes when no session is left, but where a device has it locked. Whoever reads it compares the sums that
    blocks had in the pool."""

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
        self._registered: list[Registration] = []
        self._lent: dict[str, _Lent] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._expiring: set[asyncio.Task[bool]] = set()

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    @property
    def nbytes(self) -> int:
        """Of what rests."""
        return self._used * self._bytes_each

    def memory(self, region: RegionHandle) -> memoryview | None:
        """Where a region is one of these."""
        for part in self._parts:
            if region.name in (part.memory.handle.name, self._name(part)):
                return part.memory.buffer
        return None

    async def prepare(self) -> None:
        """What a device is to copy to is locked once, which takes a second for some GB; it stays."""
        if self._lock is not None:
            await self._on_lane(self._make)

    async def take(self, sessions: Sequence[str], budget_s: float, pin: Pin, unpin: Unpin) -> KvRested:
        """In place of what rests. Raises KvUnavailable, RegionError where there is no memory for it."""
        await self.clear()
        clock = asyncio.get_running_loop().time
        deadline = clock() + budget_s
        pins: list[str] = []
        known: dict[int, int] = {}
        try:
            await self._on_lane(self._make)
            for session in sessions:
                if clock() >= deadline or self._used == self._blocks:
                    break
                pins.append(f"rest-{uuid4().hex}")
                # Else it has no full block.
                with contextlib.suppress(KvUnavailable):
                    await self._copy(session, await pin(pins[-1], session), known, deadline)
            await self._register()
        except BaseException:
            await self.clear()
            raise
        finally:
            await unpin(pins)
        tokens = sum(len(pinned.tokens) // 4 for pinned in self._sessions.values())
        return KvRested(sessions=self.sessions, tokens=tokens, nbytes=self.nbytes)

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
        self._sessions.pop(lent.session, None)
        await lent.proof.close()
        if not self._sessions:
            await self.clear()
        return True

    async def clear(self) -> None:
        """Nothing rests, and whoever reads it is not told that it did."""
        self._sessions.clear()
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

    async def _copy(self, session: str, pinned: Pinned, known: dict[int, int], deadline: float) -> None:
        """From its first block on, as far as there is time and room. `known`: blocks of the pool that are
        here, and where."""
        new = [block for block in pinned.blocks if block not in known]
        clock = asyncio.get_running_loop().time
        step = max(STEP_BYTES // self._bytes_each, 1)
        while new and self._used < self._blocks and clock() < deadline:
            some = new[: min(step, self._blocks - self._used)]
            try:
                await wholly(asyncio.wrap_future(self._run(partial(self._read, some, self._used))))
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
        return await asyncio.wrap_future(self._run(job))

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
