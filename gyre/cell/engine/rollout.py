"""The live calls of a native engine, step by step. Synchronous: whoever drives it owns the thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import structlog

from gyre.cell.engine.base import Chunk, EngineAsleep, EngineFault, EngineMetrics, OnPublish, Weights
from gyre.cell.engine.handover import Handover, KvMemory, KvStore, Pinned, Reservation
from gyre.cell.engine.sampled import SampledLedger, SampledLeg
from gyre.cell.engine.scheduler import Scheduler, Span
from gyre.cell.engine.sequence import Sequence
from gyre.cell.engine.sessions import LastCalls

log = structlog.get_logger()

Outlet = TypeVar("Outlet")

# Sessions share prefixes, so the calls whose KV is in a pool have more tokens than it.
_SHARED = 8


class Runner(KvStore, Protocol):
    """What computes: weights, the memory of the blocks, and passes over both."""

    def run(self, spans: list[Span]) -> list[tuple[Span, int, float]]:
        """Computes the spans; for each that ends its sequence: the sampled token, its log-probability."""

    def take_weights(self, weights: Weights) -> None: ...

    def release_weights(self) -> None: ...

    def take_kv(self) -> None: ...

    def release_kv(self) -> None: ...


class Rollout(Generic[Outlet]):
    """Scheduler and runner under one weight version, or asleep (`version` None). What callers are to be told
    gathers in `outbox`, each with the outlet that the call came with. While `paused` it has no work.
    `sampled` has what was sampled for calls that are over."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        chunk_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_publish: OnPublish = "recompute",
    ) -> None:
        self.version: int | None = None
        self.paused = False
        self.outbox: list[tuple[Outlet, Chunk | Exception]] = []
        self.sampled = SampledLedger()
        self._runner = runner
        self._scheduler = scheduler
        self._chunk_interval_s = chunk_interval_s
        self._live: dict[str, tuple[Sequence, Outlet]] = {}
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self._busy_s = 0.0
        self._clock = clock
        self._keep = on_publish == "keep"
        self._handover = Handover(scheduler.pool, scheduler.prefixes, runner, self._keep)
        # By pins and reservations; until one ends.
        self._crowded_out = False
        self._imported_tokens = 0
        self._refused_imports = 0
        self._mixed_tokens = 0
        pool = scheduler.pool
        self._last_calls = LastCalls(_SHARED * pool.blocks * pool.block_tokens)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work and not self.paused and not self._crowded_out

    def planned(self) -> tuple[int, int]:
        """Calls that decode, and prompt tokens that wait to be computed."""
        remaining = [sequence.remaining for sequence in (*self._scheduler.running, *self._scheduler.waiting)]
        return remaining.count(1), sum(count for count in remaining if count > 1)

    def metrics(self) -> EngineMetrics:
        """Plain reads: also from another thread."""
        pool = self._scheduler.pool
        return EngineMetrics(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            cached_tokens=self._scheduler.cached_tokens,
            preemptions=self._scheduler.preemptions,
            kv_blocks_used=pool.used,
            kv_blocks_total=pool.blocks,
            kv_blocks_pinned=self._handover.pinned,
            kv_tokens_imported=self._imported_tokens,
            kv_imports_refused=self._refused_imports,
            mixed_tokens=self._mixed_tokens,
            busy_s=self._busy_s,
        )

    def add(self, sequence: Sequence, outlet: Outlet) -> None:
        """A new call; what is wrong with it goes to its outlet."""
        call = sequence.request.call
        if self.version is None:
            self.outbox.append((outlet, EngineAsleep("the engine is asleep")))
        elif call in self._live:
            self.outbox.append((outlet, ValueError(f"call {call} is live: give each call its own id")))
        else:
            self._live[call] = (sequence, outlet)
            self._scheduler.add(sequence)
            self._crowded_out = False
            # A call resumed after its last token was sampled has nothing left to do.
            sequence.check_finished()
            if sequence.finish_reason is not None:
                self._end(sequence, sequence.take_chunk(self._clock()))

    def abort(self, call: str) -> None:
        """Ends a call, if it lives, with what it has."""
        if call in self._live:
            sequence, _ = self._live[call]
            sequence.finish_reason = "abort"
            self._end(sequence, sequence.take_chunk(self._clock()))

    def abort_all(self) -> None:
        for call in tuple(self._live):
            self.abort(call)

    def end_session(self, session: str) -> tuple[SampledLeg, ...]:
        """Aborts its calls; what was sampled for it."""
        for sequence, _ in tuple(self._live.values()):
            if sequence.request.session == session:
                self.abort(sequence.request.call)
        return self.sampled.of(session)

    def discard(self, sequence: Sequence) -> None:
        """Ends a call that nobody listens to."""
        live = self._live.get(sequence.request.call)
        if live is not None and live[0] is sequence:
            self._forget(sequence)

    def fail_all(self, error: Exception) -> None:
        """Ends all calls with a fault."""
        log.error("engine_fault", version=self.version, calls=len(self._live), error=repr(error))
        for sequence, _ in tuple(self._live.values()):
            fault = EngineFault(f"the engine failed under version {self.version}: {error!r}")
            fault.__cause__ = error
            self._end(sequence, fault)

    def step(self) -> None:
        """One forward pass."""
        assert self.version is not None
        started_s = self._clock()
        spans = self._scheduler.plan()
        self._crowded_out = not spans
        if not spans:
            return
        drawn = self._runner.run(spans)
        self._scheduler.advance(spans)
        now_s = self._clock()
        for span, token, logprob in drawn:
            self._take(span.sequence, token, logprob, self.version, now_s)
        self._prefilled_tokens += sum(span.count for span in spans if span.count > 1)
        self._busy_s += now_s - started_s

    def wake(self, weights: Weights) -> None:
        if self.version is not None:
            raise RuntimeError(f"the engine is awake under version {self.version}: use update")
        try:
            self._runner.take_weights(weights)
            self._runner.take_kv()
        except BaseException:
            self._release()
            raise
        self._admit(weights.version)

    def sleep(self) -> None:
        # Asleep, the weights may be in the trainer's use.
        if self.version is not None:
            self._release()

    def update(self, weights: Weights) -> None:
        if self.version is None:
            raise EngineAsleep("the engine is asleep: use wake")
        try:
            self._runner.take_weights(weights)
        except BaseException:
            self.sleep()
            raise
        if self._keep:
            self._scheduler.go_on(weights.version, self._last_calls.sessions())
            self.version = weights.version
        else:
            self._admit(weights.version)

    def pause(self) -> None:
        """No pass until `resume`, or until it sleeps."""
        self.paused = self.version is not None

    def resume(self) -> None:
        self.paused = False

    def kv_memory(self) -> tuple[KvMemory, ...]:
        """Of the pool, of all ranks; none asleep."""
        return self._runner.kv_memory() if self.version is not None else ()

    def pin(self, pin: str, session: str, call: str | None = None) -> Pinned:
        """Of that call where it lives, else of the newest live one of the session, else of the last that
        ended."""
        if self.version is None:
            raise EngineAsleep("the engine is asleep: its KV is gone")
        live = [sequence for sequence, _ in self._live.values() if sequence.request.session == session]
        if call is not None and call in self._live:
            live.append(self._live[call][0])
        if live:
            return self._handover.pin(pin, session, live[-1].tokens, live[-1].digests)
        return self._handover.pin(pin, session, self._last_calls.tokens(session), {})

    def unpin(self, *pins: str) -> None:
        for pin in pins:
            self._handover.unpin(pin)
        self._crowded_out = False

    def reserve(self, reservation: Reservation) -> None:
        if self.version is None:
            raise EngineAsleep("the engine is asleep: it has no room for KV")
        self._handover.reserve(reservation)

    def prepare(self, reservation: Reservation, blocks: int) -> None:
        """While what was reserved is being filled."""
        self._handover.prepare(reservation, blocks)

    def seal(self, reservation: Reservation, check: Callable[[], None]) -> int:
        """What was reserved has its KV, if `check` raises nothing."""
        if self.version is None:
            raise EngineAsleep("the engine fell asleep meanwhile")
        check()
        tokens = self._handover.seal(reservation)
        self._imported_tokens += tokens
        manifest = reservation.manifest
        # So that it can go on from here before its next call.
        self._last_calls.note(manifest.session, reservation.tokens[:tokens])
        self._crowded_out = False
        return tokens

    def refuse(self, reservation: Reservation) -> None:
        """It does not come."""
        self._handover.drop(reservation)
        self._refused_imports += 1
        self._crowded_out = False

    def end(self) -> None:
        """Ends all calls and the pool; the weights stay."""
        self.abort_all()
        self._handover.unpin_all()
        self._scheduler.pool.forget()
        self._last_calls.forget()
        self._runner.release_kv()
        self.version = None
        self.paused = False

    def _admit(self, version: int) -> None:
        self._scheduler.restart(version)
        self._crowded_out = False
        self._last_calls.forget()
        self.version = version

    def _release(self) -> None:
        self.end()
        self._runner.release_weights()

    def _take(self, sequence: Sequence, token: int, logprob: float, version: int, now_s: float) -> None:
        if not math.isfinite(logprob):
            message = f"logits of call {sequence.request.call} are not finite under version {version}"
            log.error("engine_fault", version=version, calls=1, error=message)
            self._end(sequence, EngineFault(message))
            # Perhaps its KV is what is wrong: no weights that come are to go on with that.
            self._last_calls.drop(sequence.request.session)
            self._scheduler.prefixes.drop(sequence.request.session)
            return
        self._generated_tokens += 1
        self._mixed_tokens += sequence.kv_version != version
        sequence.append(token, logprob, version)
        if sequence.finish_reason is not None:
            self._end(sequence, sequence.take_chunk(now_s))
        elif now_s - sequence.chunked_at_s >= self._chunk_interval_s:
            _, outlet = self._live[sequence.request.call]
            self.outbox.append((outlet, sequence.take_chunk(now_s)))

    def _end(self, sequence: Sequence, answer: Chunk | Exception) -> None:
        outlet = self._forget(sequence)
        self.outbox.append((outlet, answer))

    def _forget(self, sequence: Sequence) -> Outlet:
        self._crowded_out = False
        _, outlet = self._live.pop(sequence.request.call)
        self._scheduler.remove(sequence)
        self._last_calls.note(sequence.request.session, sequence.tokens)
        self.sampled.note(sequence.request.session, sequence.leg)
        return outlet
