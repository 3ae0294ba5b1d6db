"""KV of sessions from the engines of a cell that leaves to those where they go on."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from gyre.actors import Ask, Ref
from gyre.actors.errors import ActorError, RemoteError
from gyre.cell.engine.base import KvManifest
from gyre.cell.messages import ExportKv, ImportKv, ReleaseKv, RestKv
from gyre.proxy.router import Seat

log = structlog.get_logger()

# To pin and to acknowledge, which takes no copy; and how much longer than it may take KV stays pinned.
ASK_TIMEOUT_S = 5.0
# Engines that gave or took no KV so often in a row give or take none at all, or have no room.
MOST_REFUSALS = 3
# Sessions that are moved at once.
ABREAST = 4


@dataclass
class KvTally:
    """Sessions whose KV went with them, and by reason those that are computed again."""

    sessions: int = 0
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    recomputed: Counter[str] = field(default_factory=Counter)
    rested: int = 0

    def add(self, other: KvTally) -> None:
        self.sessions += other.sessions
        self.tokens += other.tokens
        self.nbytes += other.nbytes
        self.seconds += other.seconds
        self.recomputed += other.recomputed
        self.rested += other.rested


@dataclass
class Moving:
    """A session on its way from `source` to another engine, if there is one. `call` of it is in flight, if
    any. `over` is set when its KV is there (then it is `moved`), or will not come. A call that waits for that
    has it `awaited`. `rested`: the source sleeps."""

    session: str
    source: Seat[Ref]
    to: Seat[Ref] | None
    call: str | None = None
    manifest: KvManifest | None = None
    rested: bool = False
    moved: bool = False
    awaited: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Migration:
    """Of one cell, for the role change `change`: `budget_s` from now on, of which sessions without a call
    leave `rest_s` for those that find no place."""

    def __init__(self, change: str, budget_s: float, rest_s: float = 0.0) -> None:
        self._change = change
        self._lease_s = budget_s + 2 * ASK_TIMEOUT_S
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + budget_s
        self._idle_deadline = self._deadline - rest_s
        self._refusals = 0
        self._abreast = asyncio.Semaphore(ABREAST)
        # Why those without a call stay behind.
        self._reasons: dict[str, str] = {}
        self.tally = KvTally()

    async def pin(self, moving: Moving) -> None:
        """Has the source hold its KV."""
        if moving.to is None:
            self._recompute(moving, "no_destination")
            return
        ask = ExportKv(session=moving.session, lease_s=self._lease_s, call=moving.call)
        moving.manifest = await self._ask(moving, moving.source, ask, "pin", ASK_TIMEOUT_S)

    async def move(self, moving: Moving) -> None:
        """Has the destination read what is pinned, and the source let go of it."""
        try:
            if moving.manifest is not None and moving.to is not None:
                async with self._abreast:
                    await self._import(moving, moving.manifest, moving.to)
        finally:
            moving.over.set()

    async def move_idle(self, moving: Moving) -> None:
        try:
            await self.pin(moving)
        except BaseException:
            moving.over.set()
            raise
        await self.move(moving)

    async def rest(self, source: Seat[Ref], sessions: Sequence[str]) -> tuple[str, ...]:
        """Has the source keep their KV in host memory while it sleeps. Answers those of which it has any."""
        began_s = self._clock()
        if (left_s := self._deadline - began_s) <= 0:
            return ()
        try:
            ask = RestKv(sessions=tuple(sessions), budget_s=left_s)
            rested = await source.ref.ask(ask, timeout_s=left_s + ASK_TIMEOUT_S)
        except (ActorError, TimeoutError) as error:
            log.info("kv_not_rested", change=self._change, cell=source.key.cell, why=str(error))
            return ()
        self.tally.rested += len(rested.sessions)
        log.info(
            "kv_rested",
            change=self._change,
            cell=source.key.cell,
            executions=rested.sessions,
            tokens=rested.tokens,
            nbytes=rested.nbytes,
            seconds=round(self._clock() - began_s, 4),
        )
        return rested.sessions

    def leave(self, session: str) -> None:
        """There is no time for it, or no use."""
        self._count(session, "left_behind")

    def rests(self, session: str) -> None:
        """It stays behind, but is not computed again."""
        if (reason := self._reasons.pop(session, None)) is not None:
            self.tally.recomputed -= Counter([reason])

    @property
    def goes_on(self) -> bool:
        """Whether there is time for one more without a call, and any use."""
        return self._clock() < self._idle_deadline and self._refusals < MOST_REFUSALS

    async def _import(self, moving: Moving, manifest: KvManifest, to: Seat[Ref]) -> None:
        began_s = self._clock()
        left_s = (self._idle_deadline if moving.call is None else self._deadline) - began_s
        try:
            if left_s > 0:
                tokens = await self._ask(moving, to, ImportKv(manifest=manifest), "import", left_s)
                if tokens is not None:
                    self._moved(moving, manifest, to, tokens, self._clock() - began_s)
            else:
                self._recompute(moving, "budget")
        finally:
            moving.over.set()
            # Not counted: what was read was proved then.
            await self._ask(moving, moving.source, ReleaseKv(pin=manifest.pin), None, ASK_TIMEOUT_S)

    def _moved(
        self, moving: Moving, manifest: KvManifest, to: Seat[Ref], tokens: int, seconds: float
    ) -> None:
        nbytes = manifest.nbytes * tokens // manifest.length_tokens
        self._refusals = 0
        moving.moved = True
        self.tally.add(KvTally(1, tokens, nbytes, seconds))
        log.info(
            "kv_moved",
            change=self._change,
            execution=moving.session,
            call=moving.call,
            cell=moving.source.key.cell,
            to_cell=to.key.cell,
            rested=moving.rested,
            tokens=tokens,
            nbytes=nbytes,
            seconds=round(seconds, 4),
        )

    async def _ask(
        self, moving: Moving, seat: Seat[Ref], message: Ask[Any], stage: str | None, timeout_s: float
    ) -> Any:
        """None where it fails; of a `stage` that is a session to be computed again."""
        try:
            return await seat.ref.ask(message, timeout_s=timeout_s)
        except (ActorError, TimeoutError) as error:
            if stage is not None:
                name = error.type_name if isinstance(error, RemoteError) else type(error).__name__
                self._refusals += 1
                self._recompute(moving, f"{stage}_{re.split('[.:]', name)[-1]}", str(error))
            return None

    def _recompute(self, moving: Moving, reason: str, why: str = "") -> None:
        if moving.call is None:
            self._count(moving.session, reason)
        else:
            self.tally.recomputed[reason] += 1
        log.info(
            "kv_not_moved",
            change=self._change,
            execution=moving.session,
            call=moving.call,
            cell=moving.source.key.cell,
            to_cell=None if moving.to is None else moving.to.key.cell,
            rested=moving.rested,
            reason=reason,
            why=why,
        )

    def _count(self, session: str, reason: str) -> None:
        self.tally.recomputed[reason] += 1
        self._reasons[session] = reason
