"""Calls at engines: waits for an open one, follows a call from engine to engine until it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from gyre.actors import Ref
from gyre.actors.errors import ActorDied, ActorError, RemoteError, error_name
from gyre.cell.engine.base import Chunk, ContextOverflow, GenerateRequest
from gyre.cell.messages import Abort, Generate
from gyre.cell.states import StateTimes, log_state
from gyre.proxy.conversation import CallError, unavailable
from gyre.proxy.migration import KvTally, Migration, Moving
from gyre.proxy.router import EngineKey, Router, Seat
from gyre.schedule.messages import OpenRoute, RouteClosed

log = structlog.get_logger()

# How long an engine may take to hear that a call is aborted, and then to end it.
_ABORT_TIMEOUT_S = 5.0
_ABORT_GRACE_S = 1.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
# Of the seconds for KV, those for what stays in memory of its host.
_REST_SHARE = 0.25


@dataclass
class Sample:
    """What was sampled for one call so far, at whatever engines; `moved_at` is how much it was when the call
    left one before its end."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int = 0
    moved_at: list[int] = field(default_factory=list)
    # Called when there is more of it.
    heard: Callable[[], None] | None = None

    @property
    def reroutes(self) -> int:
        return len(self.moved_at)

    def add(self, chunk: Chunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        self.kv_versions += chunk.kv_versions or chunk.versions
        if self.reroutes == 0:
            self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        if self.heard is not None:
            self.heard()


@dataclass
class _Leg:
    """A call's stay at one engine, `over` when it is not there any more. `leash` ends it from outside;
    `leaving`: its cell leaves rollout, and the call waits for its KV, which is `moving`."""

    seat: Seat[Ref]
    leash: asyncio.Timeout
    session: str
    over: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    change: str = ""
    moving: Moving | None = None


class _Resting(NamedTuple):
    """At an engine since that role change."""

    source: Seat[Ref]
    change: str


class Routes:
    """The open engines, and the calls in flight there. A call waits up to `wait_s` for progress. Of a cell
    that leaves KV is moved for up to `kv_budget_s`; with `kv_rests` it keeps what finds no place."""

    def __init__(self, wait_s: float, kv_budget_s: float = 0.0, *, kv_rests: bool = False) -> None:
        self._wait_s = wait_s
        self._kv_budget_s = kv_budget_s
        # Idle sessions that are on their way.
        self._moving: dict[str, Moving] = {}
        # Sessions whose KV rests at a cell that has left rollout.
        self._rest_s = kv_budget_s * _REST_SHARE if kv_rests else 0.0
        self._resting: dict[str, _Resting] = {}
        self.kv = KvTally()
        self._router: Router[Ref] = Router()
        self._engines: dict[int, tuple[Ref, ...]] = {}
        # Where calls of a session have been.
        self._visited: dict[str, set[Ref]] = {}
        self._legs: dict[str, _Leg] = {}
        self._opened = asyncio.Event()

    def open(self, route: OpenRoute) -> None:
        """This cell admits calls."""
        self._wake(route.cell, route.incarnation)
        self._router.open(route.cell, route.incarnation, route.engines, route.capacity_calls)
        self.know(route.cell, route.engines)
        self._opened.set()
        self._opened = asyncio.Event()

    def know(self, cell: int, engines: tuple[Ref, ...]) -> None:
        """Those of a cell's life, also where it is in no rollout role now."""
        self._engines[cell] = engines

    @property
    def engines(self) -> tuple[Ref, ...]:
        """Of each cell in its last life, whatever its role."""
        return tuple(engine for engines in self._engines.values() for engine in engines)

    def visited(self, session: str) -> tuple[Ref, ...]:
        """Engines that had calls of a session which is over; told once."""
        return tuple(self._visited.pop(session, ()))

    async def close(self, cell: int, *, lost: bool, change: str = "") -> RouteClosed:
        """Admits no more calls to the cell and ends those in flight there, so that they go on elsewhere.
        Returns when none is left at the cell."""
        times = StateTimes(partial(log_state, change, cell) if change else None)
        self._wake(cell, None)
        migration = None
        if self._kv_budget_s > 0 and not lost:
            migration = Migration(change, self._kv_budget_s, self._rest_s)
        with times.measure("stop_admitting"):
            sessions = self._router.sessions_at(cell)
            calls = self._router.close(cell)
            legs = {call: self._legs[call] for call in calls}
            # Of a cell that is lost in a change some leave already, and are counted there.
            leave = sum(not leg.leaving for leg in legs.values())
            for leg in legs.values():
                leg.leaving, leg.change = True, change or leg.change
            going = [self._reserve(call, leg) for call, leg in legs.items()] if migration else []
        try:
            if migration is not None:
                with times.measure("pin"):
                    await asyncio.gather(*(migration.pin(moving) for moving in going))
            with times.measure("cancel"):
                if lost:
                    for leg in legs.values():
                        _cut(leg)
                else:
                    await asyncio.gather(*(_abort(call, leg) for call, leg in legs.items()))
            if migration is not None:
                with times.measure("migrate"):
                    await asyncio.gather(*(migration.move(moving) for moving in going))
        finally:
            for moving in going:
                moving.over.set()
        with times.measure("hand_over"):
            for leg in legs.values():
                await leg.over.wait()
        kv = KvTally() if migration is None else migration.tally
        recomputed = leave - kv.sessions
        if migration is not None:
            with times.measure("migrate_idle"):
                left = await self._move_idle(migration, cell, sessions)
            if self._rest_s:
                with times.measure("rest_idle"):
                    await self._rest(migration, change, left)
            self.kv.add(kv)
        return RouteClosed(
            calls=leave,
            sessions_moved=kv.sessions,
            recomputed=recomputed,
            states_s=times.by_state_s,
            kv_nbytes=kv.nbytes,
            recomputed_by=dict(kv.recomputed),
        )

    def _reserve(self, call: str, leg: _Leg) -> Moving:
        """A place elsewhere, before the call is ended."""
        to = self._router.pick(leg.session, moved=True)
        if to is not None:
            self._router.promise(call, to.key)
        leg.moving = Moving(leg.session, leg.seat, to, call)
        return leg.moving

    async def _move_idle(
        self, migration: Migration, cell: int, sessions: tuple[tuple[str, Seat[Ref]], ...]
    ) -> dict[Seat[Ref], list[str]]:
        """Those whose harness is busy elsewhere, the latest first: their next calls go where their KV is.
        Answers by engine those whose KV stays behind."""
        left: dict[Seat[Ref], list[str]] = {}
        for session, source in sessions:
            # Of one that called meanwhile the place is known already.
            if self._router.seat_of(session) != source.key:
                continue
            if not migration.goes_on:
                migration.leave(session)
            elif (to := self._router.place(session)) is not None:
                moving = self._moving[session] = Moving(session, source, to)
                try:
                    await migration.move_idle(moving)
                finally:
                    del self._moving[session]
                if moving.moved or moving.awaited or not self._rest_s:
                    continue
                self._router.put(session, source.key)
            left.setdefault(source, []).append(session)
        return left

    async def _rest(self, migration: Migration, change: str, left: dict[Seat[Ref], list[str]]) -> None:
        """It waits there for the cell to come back, or for the next call of the session."""
        for source, sessions in left.items():
            for session in await migration.rest(source, sessions):
                # One that called meanwhile goes on elsewhere.
                if self._router.seat_of(session) == source.key:
                    migration.rests(session)
                    self._resting[session] = _Resting(source, change)

    def _wake(self, cell: int, incarnation: int | None) -> None:
        """What rested there is in its pool, or gone: with another life of the cell, or where it has none."""
        here = [
            (session, at.source.key) for session, at in self._resting.items() if at.source.key.cell == cell
        ]
        for session, key in here:
            del self._resting[session]
            if key.incarnation != incarnation:
                self.kv.recomputed["rest_lost"] += 1

    async def _fetch(self, session: str) -> None:
        """A call comes: its KV is on its way, or is sent for where it rests, as soon as there is a place for
        it. Raises CallError."""
        if session in self._resting:
            await self._until_open()
        if (moving := self._moving.get(session)) is not None:
            moving.awaited = True
            await moving.over.wait()
            return
        # Unless its cell is the one that has opened.
        if (resting := self._resting.pop(session, None)) is None:
            return
        to = self._router.pick(session, moved=True)
        assert to is not None
        moving = self._moving[session] = Moving(session, resting.source, to, rested=True)
        migration = Migration(resting.change, self._kv_budget_s)
        try:
            await migration.move_idle(moving)
        finally:
            del self._moving[session]
        self.kv.add(migration.tally)

    def forget_session(self, session: str) -> None:
        """No more calls of it will come."""
        self._router.forget_session(session)
        self._resting.pop(session, None)

    async def sample(self, request: GenerateRequest, sample: Sample | None = None) -> Sample:
        """The whole answer to a call, from as many engines as it takes: a call that is ended at one goes on
        at another from its tokens so far. They are in `sample`, also where it ends with CallError."""
        sample = sample or Sample()
        excluded: set[EngineKey] = set()
        clock = asyncio.get_running_loop().time
        pause_s = _FIRST_PAUSE_S
        moved = False
        leg: _Leg | None = None
        await self._fetch(request.session)
        deadline = clock() + self._wait_s
        try:
            while not sample.finish_reason:
                if leg is not None and leg.moving is not None:
                    await leg.moving.over.wait()
                seat = await self._acquire(request.session, excluded, moved, pause_s, deadline)
                if request.session in self._resting:
                    # It has come to rest while the call waited.
                    await self._fetch(request.session)
                    deadline = clock() + self._wait_s
                    continue
                if leg is not None and moved:
                    _log_move(request, leg, seat, sample)
                before = len(sample.token_ids)
                leg = await self._stay(seat, request, sample)
                moved = leg.leaving
                if not sample.finish_reason:
                    excluded.add(seat.key)
                    sample.moved_at.append(len(sample.token_ids))
                if moved or len(sample.token_ids) > before:
                    deadline, pause_s = clock() + self._wait_s, _FIRST_PAUSE_S
                else:
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._router.over(request.call)
        return sample

    async def _acquire(
        self, session: str, excluded: set[EngineKey], moved: bool, pause_s: float, deadline: float
    ) -> Seat[Ref]:
        try:
            async with asyncio.timeout_at(deadline):
                while (seat := self._router.pick(session, exclude=excluded, moved=moved)) is None:
                    opened = self._opened.wait()
                    if self._router.any_open:
                        # Only engines that failed this call are open: let them breathe, then try again.
                        with suppress(TimeoutError):
                            async with asyncio.timeout(pause_s):
                                await opened
                    else:
                        await opened
                    excluded.clear()
        except TimeoutError:
            raise self._not_taken() from None
        return seat

    async def _until_open(self) -> None:
        """Raises CallError."""
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._router.any_open:
                    await self._opened.wait()
        except TimeoutError:
            raise self._not_taken() from None

    def _not_taken(self) -> CallError:
        return unavailable(f"no cell took the call within {self._wait_s:g} s")

    async def _stay(self, seat: Seat[Ref], request: GenerateRequest, sample: Sample) -> _Leg:
        """Adds to the sample until it is complete or the call has to leave: because its cell does, where
        the leg says so, else for a failure."""
        call = request.call
        self._router.begin(call, seat.key)
        self._visited.setdefault(request.session, set()).add(seat.ref)
        async with AsyncExitStack() as stack:
            stack.callback(self._leave, call)
            leg = self._legs[call] = _Leg(seat, asyncio.timeout(None), request.session)
            try:
                async with leg.leash:
                    await _collect(seat, _rest(request, sample), sample)
                reason = "it ended the call unasked"
            except ActorDied as error:
                self._router.fail(seat.key)
                reason = str(error)
            except RemoteError as error:
                if (refusal := _refusal(error)) is not None:
                    raise refusal from error
                reason = str(error)
            except (ActorError, TimeoutError) as error:
                reason = str(error)
        if not sample.finish_reason and not leg.leaving:
            log.warning("engine_failed", cell=seat.key.cell, call=call, reason=reason)
        return leg

    def _leave(self, call: str) -> None:
        self._legs.pop(call).over.set()
        self._router.end(call)


async def _abort(call: str, leg: _Leg) -> None:
    """Ends a call at its engine, kindly if that answers in time: so its last tokens are kept."""
    try:
        await leg.seat.ref.ask(Abort(call=call), timeout_s=_ABORT_TIMEOUT_S)
        async with asyncio.timeout(_ABORT_GRACE_S):
            await leg.over.wait()
    except (TimeoutError, ActorError) as error:
        log.warning("abort_failed", cell=leg.seat.key.cell, call=call, reason=str(error))
        if not leg.over.is_set():
            _cut(leg)


async def _collect(seat: Seat[Ref], request: GenerateRequest, sample: Sample) -> None:
    limit = request.sampling.max_new_tokens
    async with aclosing(seat.ref.stream(Generate(request=request))) as chunks:
        async for chunk in chunks:
            sample.add(chunk)
            if chunk.finish_reason in ("stop", "length"):
                sample.finish_reason = chunk.finish_reason
            elif len(sample.token_ids) >= limit:
                sample.finish_reason = "length"
            if sample.finish_reason or chunk.finish_reason == "abort":
                return


def _log_move(request: GenerateRequest, left: _Leg, seat: Seat[Ref], sample: Sample) -> None:
    log.info(
        "call_moved",
        change=left.change,
        execution=request.session,
        call=request.call,
        cell=left.seat.key.cell,
        to_cell=seat.key.cell,
        tokens=len(sample.token_ids),
    )


def _refusal(error: RemoteError) -> CallError | None:
    """Where any engine would say the same of this call."""
    if error.type_name == error_name(ContextOverflow):
        return CallError(400, error.message, code="context_length_exceeded")
    if error.type_name == error_name(ValueError):
        return CallError(500, f"the engine refused the call: {error.message}", code="internal")
    return None


def _cut(leg: _Leg) -> None:
    leg.leash.reschedule(asyncio.get_running_loop().time())


def _rest(request: GenerateRequest, sample: Sample) -> GenerateRequest:
    """What is left of a call: the tokens so far become prompt, the positions of its draws go on."""
    if not sample.moved_at:
        return request
    prompt_ids = request.prompt_ids + tuple(sample.token_ids)
    return msgspec.structs.replace(request, prompt_ids=prompt_ids, stay=len(sample.moved_at))
