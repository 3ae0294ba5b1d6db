"""An engine over a `Rollout`: calls come in on an event loop, the work is done on a lane."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar
from uuid import uuid4

import msgspec
import structlog

from gyre.cell.engine import draws
from gyre.cell.engine.base import (
    KV_LEASE_S,
    Chunk,
    ContextOverflow,
    EngineAsleep,
    EngineMetrics,
    GenerateRequest,
    KvManifest,
    KvRested,
    KvUnavailable,
    OnPublish,
    Weights,
)
from gyre.cell.engine.blocks import BlockPool
from gyre.cell.engine.handover import Pinned, Reservation
from gyre.cell.engine.kv_home import KvHome
from gyre.cell.engine.kv_moves import KvMoves
from gyre.cell.engine.kv_rest import KvRest
from gyre.cell.engine.rollout import Rollout, Runner
from gyre.cell.engine.sampled import SampledLeg
from gyre.cell.engine.scheduler import Scheduler
from gyre.cell.engine.sequence import Sequence
from gyre.cell.engine.unheard import unheard
from gyre.rdma import RegionError, RegionHandle

log = structlog.get_logger()

R = TypeVar("R")
_Outlet = asyncio.Queue[Chunk | Exception]


class Lane(Protocol):
    """Where an engine's jobs are done, one at a time, in their order."""

    def run(self, job: Callable[[], R]) -> Future[R]:
        """Called on the event loop that answers are for."""

    def run_pass(self, job: Callable[[], None]) -> None:
        """Called on the lane."""

    def tell(self, callback: Callable[[], None]) -> None:
        """Called on the lane: runs it on the event loop."""

    def close(self) -> None: ...


class DrivenEngine:
    """An `Engine` (see base.py). It starts asleep and does not touch the weights before `wake`.

    A pass, a load, a sleep is one job on the lane each, and jobs of others may run in between. The event
    loop only sends jobs and passes answers on. An idle engine has no job.

    The window is `window_tokens`, or what `kv_tokens` can hold if that is less. A pass computes at most
    `step_tokens` tokens of prompts, so that running calls wait no longer than that for their next token.
    KV is handed over by way of its `kv_home`. `on_publish`: what an update does with KV. Up to
    `kv_rest_bytes` of it rest in host memory.
    """

    def __init__(
        self,
        runner: Runner,
        lane: Lane,
        clock: Callable[[], float],
        *,
        window_tokens: int,
        kv_tokens: int,
        block_tokens: int,
        max_batch: int,
        chunk_interval_s: float,
        eos_token_ids: tuple[int, ...],
        step_tokens: int,
        kv_home: KvHome | None,
        on_publish: OnPublish = "recompute",
        kv_rest_bytes: int = 0,
    ) -> None:
        blocks = kv_tokens // block_tokens
        if blocks < 1:
            raise ValueError(f"kv_tokens is {kv_tokens}: give at least one block of {block_tokens} tokens")
        scheduler = Scheduler(BlockPool(blocks, block_tokens), max_batch, step_tokens)
        self._rollout: Rollout[_Outlet] = Rollout(runner, scheduler, chunk_interval_s, clock, on_publish)
        self._rest: KvRest | None = None
        if kv_home is not None and kv_rest_bytes:
            self._rest = KvRest(kv_home, runner, lane.run, kv_rest_bytes, blocks)
        self._moves = None if kv_home is None else KvMoves(kv_home, runner, lane.run, self._own_rest)
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._expiring: set[asyncio.Task[bool]] = set()
        self._importing: set[asyncio.Task[int]] = set()
        self._window_tokens = min(window_tokens, blocks * block_tokens)
        self._vocab = runner.vocab
        self._eos = frozenset(eos_token_ids)
        self._lane = lane
        self._clock = clock
        self._pass_queued = False
        self._closed = False

    @property
    def version(self) -> int | None:
        return self._rollout.version

    @property
    def window_tokens(self) -> int:
        """The most tokens, prompt and output, that a call can have."""
        return self._window_tokens

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if self.version is None:
            raise EngineAsleep("the engine is asleep")
        self._check()
        if self._rest is not None:
            await self._rest.give_up()
        sequence = self._sequence(request)
        outlet: _Outlet = asyncio.Queue()
        self._submit(partial(self._rollout.add, sequence, outlet))
        ended = False
        try:
            while not ended:
                answer = await outlet.get()
                if isinstance(answer, Exception):
                    ended = True
                    raise answer
                ended = answer.finish_reason is not None
                yield answer
        finally:
            if not ended and not self._closed:
                self._submit(partial(self._rollout.discard, sequence))

    async def abort(self, call: str) -> None:
        if self.version is not None:
            await self._on_lane(partial(self._rollout.abort, call))

    async def abort_all(self) -> None:
        if self.version is not None:
            await self._on_lane(self._rollout.abort_all)

    async def end_session(self, session: str) -> tuple[SampledLeg, ...]:
        # Asleep it has no calls, and the lane may be the trainer's.
        if self.version is None:
            return self._rollout.sampled.of(session)
        return await self._on_lane(partial(self._rollout.end_session, session))

    def forget_session(self, session: str) -> None:
        if self.version is None:
            self._rollout.sampled.forget(session)
        elif not self._closed:
            self._submit(partial(self._rollout.sampled.forget, session))

    async def pause(self) -> None:
        if self.version is not None:
            await self._on_lane(self._rollout.pause)

    async def resume(self) -> None:
        if self.version is not None:
            await self._on_lane(self._rollout.resume)

    async def sleep(self) -> None:
        """Does nothing to an engine that sleeps: the weights may be in the trainer's use."""
        if self.version is not None:
            if self._rest is not None:
                await self._rest.settle()
            await self._end_moves()
            await self._on_lane(self._rollout.sleep)

    async def wake(self, weights: Weights) -> None:
        await self._on_lane(partial(self._rollout.wake, weights))
        await self._open_moves()
        await self._wake_kv()

    async def update(self, weights: Weights) -> None:
        try:
            await self._on_lane(partial(self._rollout.update, weights))
        except BaseException:
            if self.version is None:
                await self._end_moves()
            raise

    # --- handing KV over --------------------------------------------------------------------------

    async def export_kv(
        self, session: str, lease_s: float = KV_LEASE_S, call: str | None = None
    ) -> KvManifest:
        if self.version is None:
            if self._rest is not None and session in self._rest.sessions:
                return await self._rest.export(session, lease_s)
            raise EngineAsleep("the engine is asleep: its KV is gone")
        moves, pin = self._moves_(), f"pin-{uuid4().hex}"
        life = moves.life
        try:
            pinned = await self._on_lane(partial(self._rollout.pin, pin, session, call))
            proof = await moves.prove(pin, pinned.blocks, life)
        except BaseException:
            # Also where nobody waits for it any more.
            self._submit(partial(self._rollout.unpin, pin))
            raise
        self._leases[pin] = asyncio.get_running_loop().call_later(lease_s, self._expire, pin)
        layout, newest, tokens, blocks, sums = pinned
        return KvManifest(
            session=session,
            layout=layout,
            newest=newest,
            tokens=tokens,
            blocks=blocks,
            parts=moves.parts(sums),
            pin=pin,
            proof=proof,
            lease_s=lease_s,
            slot_blocks=moves.slot_blocks,
        )

    async def release_kv(self, pin: str) -> bool:
        if (lease := self._leases.pop(pin, None)) is None:
            return self._rest is not None and await self._rest.release(pin)
        lease.cancel()
        try:
            return self._moves is not None and await self._moves.disprove(pin)
        finally:
            if not self._closed:
                await self._surely_on_lane(partial(self._rollout.unpin, pin))

    async def import_kv(self, manifest: KvManifest) -> int:
        if self.version is None:
            raise EngineAsleep("the engine is asleep: it has no room for KV")
        moves = self._moves_()
        # A sleep ends it, and so does who waits for it.
        task = asyncio.get_running_loop().create_task(self._import(moves, manifest), name="import KV")
        self._importing.add(task)
        task.add_done_callback(self._importing.discard)
        task.add_done_callback(unheard)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled():
            raise EngineAsleep("the engine fell asleep meanwhile")
        return task.result()

    async def _import(self, moves: KvMoves, manifest: KvManifest) -> int:
        reservation = Reservation(manifest)
        try:
            await self._on_lane(partial(self._rollout.reserve, reservation))
            check = await moves.fetch(reservation, partial(self._rollout.prepare, reservation))
            return await self._on_lane(partial(self._rollout.seal, reservation, check))
        except BaseException:
            await self._surely_on_lane(partial(self._rollout.refuse, reservation))
            raise

    async def rest_kv(self, sessions: Seq[str], budget_s: float) -> KvRested:
        if self.version is None:
            raise EngineAsleep("the engine is asleep: its KV is gone")
        if self._rest is None:
            raise KvUnavailable("no KV rests in host memory: kv_rest_bytes is 0")
        return await self._rest.take(sessions, budget_s, self._pin, self._unpin)

    async def _pin(self, pin: str, session: str) -> Pinned:
        return await self._on_lane(partial(self._rollout.pin, pin, session))

    async def _unpin(self, pins: Seq[str]) -> None:
        await self._surely_on_lane(partial(self._rollout.unpin, *pins))

    async def _wake_kv(self) -> None:
        if self._rest is not None:
            await self._rest.put_back(self.import_kv)

    def _own_rest(self, region: RegionHandle) -> memoryview | None:
        return None if self._rest is None else self._rest.memory(region)

    def _moves_(self) -> KvMoves:
        if self._moves is None:
            raise KvUnavailable("the engine has no home for KV that others read")
        return self._moves

    async def _open_moves(self) -> None:
        """Without them it computes all the same."""
        if self._moves is not None:
            try:
                await self._moves.open(await self._on_lane(self._rollout.kv_memory))
            except (RegionError, KvUnavailable) as error:
                log.warning("kv_not_registered", reason=str(error))

    async def _end_moves(self) -> None:
        """Before the memory goes."""
        while self._importing:
            for task in tuple(self._importing):
                task.cancel()
            await asyncio.wait(self._importing)
        for lease in self._leases.values():
            lease.cancel()
        self._leases.clear()
        if self._moves is not None:
            await self._moves.close()
        if self._expiring:
            await asyncio.wait(self._expiring)

    def _expire(self, pin: str) -> None:
        log.warning("kv_pin_expired", pin=pin)
        task = asyncio.get_running_loop().create_task(self.release_kv(pin), name="expire a pin")
        self._expiring.add(task)
        task.add_done_callback(self._expiring.discard)
        task.add_done_callback(unheard)

    def metrics(self) -> EngineMetrics:
        found = self._rollout.metrics()
        if self._rest is None:
            return found
        return msgspec.structs.replace(
            found,
            kv_bytes_resting=self._rest.nbytes,
            kv_tokens_rested=self._rest.rested_tokens,
            kv_tokens_put_back=self._rest.put_back_tokens,
            kv_rests_dropped=self._rest.dropped,
        )

    async def watch(self) -> None:
        """It is lost with its process only."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """The weights stay as they are."""
        if self._closed:
            return
        await self._end_moves()
        if self._rest is not None:
            await self._rest.close()
        if self._moves is not None:
            await self._moves.end()
        await self._on_lane(self._end)
        self._closed = True
        self._lane.close()

    def _check(self) -> None:
        """Raises EngineFault where it cannot answer any more."""

    def _sequence(self, request: GenerateRequest) -> Sequence:
        prompt = request.prompt_ids
        if not 0 < request.prompt_tokens <= len(prompt):
            raise ValueError(
                f"prompt_tokens is {request.prompt_tokens}: give 1 to the {len(prompt)} of prompt_ids"
            )
        if request.prompt_tokens >= self._window_tokens:
            raise ContextOverflow(request.prompt_tokens, self._window_tokens)
        if min(prompt) < 0 or max(prompt) >= self._vocab:
            raise ValueError(
                f"prompt_ids has {min(prompt)} to {max(prompt)}: the model knows 0 to {self._vocab - 1}"
            )
        draws.check(request.sampling)
        eos = frozenset[int]() if request.sampling.ignore_eos else self._eos
        return Sequence(
            request=request,
            tokens=list(prompt),
            end_tokens=min(request.prompt_tokens + request.sampling.max_new_tokens, self._window_tokens),
            stop_ids=eos.union(request.sampling.stop_token_ids),
            # The first token leaves at once: somebody waits for it.
            chunked_at_s=-math.inf,
        )

    async def _on_lane(self, work: Callable[[], R]) -> R:
        """Runs it there and answers, or raises, as it did."""
        return await asyncio.wrap_future(self._lane.run(partial(self._job, work)))

    async def _surely_on_lane(self, work: Callable[[], None]) -> None:
        """Also where nobody waits for it any more: it is there, before whatever comes next."""
        done = asyncio.wrap_future(self._lane.run(partial(self._job, work)))
        done.add_done_callback(unheard)
        await asyncio.shield(done)

    def _submit(self, work: Callable[[], None]) -> None:
        """Runs it on the lane; if it fails, every live call is told."""
        self._lane.run(partial(self._job, partial(self._guarded, work)))

    # --- on the lane ----------------------------------------------------------------------------

    def _end(self) -> None:
        self._rollout.end()

    def _job(self, work: Callable[[], R]) -> R:
        try:
            return work()
        finally:
            self._queue_pass()
            self._deliver()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._rollout.fail_all(error)

    def _queue_pass(self) -> None:
        if self._rollout.has_work and not self._pass_queued:
            self._pass_queued = True
            self._lane.run_pass(partial(self._job, partial(self._guarded, self._pass)))

    def _pass(self) -> None:
        self._pass_queued = False
        if self._rollout.has_work:
            self._rollout.step()

    def _deliver(self) -> None:
        answers = self._rollout.outbox
        if answers:
            self._rollout.outbox = []
            self._lane.tell(partial(_put_all, answers))


def _put_all(answers: list[tuple[_Outlet, Chunk | Exception]]) -> None:
    for outlet, answer in answers:
        outlet.put_nowait(answer)
