"""The live calls of a SGLang engine: sent when they may be, read as fast as they come, ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from gyre.cell.engine.base import Chunk, EngineFault, EngineMetrics, GenerateRequest
from gyre.cell.engine.sampled import SampledLedger, SampledLeg
from gyre.cell.engine.sglang_call import Call
from gyre.cell.engine.sglang_counts import Counts
from gyre.cell.engine.sglang_link import Link
from gyre.cell.engine.sglang_request import Requests

ABORT_AGAIN_S = 0.1
ABORT_TIMEOUT_S = 10.0


class Streams:
    """Calls over one link. While it is `held` none is sent, and those that live tell only their end.
    `sampled` has what came for calls that are over."""

    def __init__(self, link: Link, requests: Requests, counts: Counts, chunk_interval_s: float) -> None:
        self.sampled = SampledLedger()
        self._link = link
        self._requests = requests
        self._counts = counts
        self._chunk_interval_s = chunk_interval_s
        self._live: dict[str, Call] = {}
        self._rids = itertools.count()
        self._held = False
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> bool:
        return self._held

    def metrics(self) -> EngineMetrics:
        return self._counts.metrics(self._live.values())

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """A call from its beginning to its end; closing it ends it at the server too."""
        if request.call in self._live:
            raise ValueError(f"call {request.call} is live: give each call its own id")
        call = Call(request, self._requests.stops_here(request), self._chunk_interval_s)
        call.hold(self._held)
        self._live[request.call] = call
        self._counts.live(len(self._live))
        reader = self.run(self._read(call))
        try:
            async with aclosing(call.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            del self._live[request.call]
            self.sampled.note(request.session, call.leg)
            self._counts.over(call)
            self._counts.live(len(self._live))
            # One that the server has ended is read on to its end: there is nothing to abort.
            if not call.over_at_server and not reader.done():
                reader.cancel()
                if call.sent:
                    self.run(self._forget(call))

    async def end(self, name: str) -> None:
        """Aborts a call, if it lives; returns when it has its last chunk."""
        if name in self._live:
            await self._end([self._live[name]], False)

    async def end_session(self, session: str) -> tuple[SampledLeg, ...]:
        """Aborts its calls; what was sampled for it."""
        calls = [call for call in self._live.values() if call.request.session == session]
        await self._end(calls, False)
        # Whoever listens to them may not have heard their ends yet.
        left = [call.leg for call in calls if self._live.get(call.request.call) is call and call.running]
        return (*self.sampled.of(session), *left)

    async def end_all(self) -> None:
        await self._end([*self._live.values()], True)

    async def call_back(self) -> None:
        """Ends all at the server. They are sent again, with what they have, when calls are admitted."""
        for call in self._live.values():
            call.recalled = True
        await self._end_at_server([*self._live.values()], True)

    def finish_all(self) -> None:
        """Ends all at once, whatever the server still does."""
        for call in self._live.values():
            call.finish("abort")

    def fail_all(self, fault: EngineFault) -> None:
        for call in self._live.values():
            call.fail(fault)

    def hold(self, held: bool) -> None:
        self._held = held
        self.admit(not held)
        for call in self._live.values():
            call.hold(held)

    def admit(self, admitting: bool) -> None:
        """Whether new calls are sent; those that live go on."""
        if admitting:
            self._admitting.set()
        else:
            self._admitting.clear()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """As a task that `close` waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=ABORT_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()

    async def _read(self, call: Call) -> None:
        try:
            while True:
                while not self._admitting.is_set():
                    await self._admitting.wait()
                over = self._requests.over_already(call.so_far)
                if over is not None:
                    call.finish(over)
                if call.ended.is_set():
                    return
                await self._ask(call)
                if not call.back:
                    break
            call.fail(EngineFault(f"SGLang ended the stream of call {call.request.call} without a reason"))
        except EngineFault as fault:
            call.fail(await self._link.explained(fault))
        except Exception as error:
            call.fail(error)

    async def _ask(self, call: Call) -> None:
        """Sends it and reads what the server answers."""
        call.send(f"gyre-{id(self):x}-{next(self._rids)}")
        together = self._counts.tokens_together(self._chunk_interval_s, len(self._live))
        body = self._requests.body(call.so_far, call.rid, together)
        async with aclosing(self._link.client.generate(body)) as events:
            async for event in events:
                began = call.running
                self._counts.fed(call, call.feed(event), call.running and not began)
                if call.stopped_early:
                    self.run(self._forget(call))
                    return

    async def _end(self, calls: Sequence[Call], everything: bool) -> None:
        with contextlib.suppress(TimeoutError, EngineFault):
            await self._end_at_server(calls, everything)
        for call in calls:
            call.finish("abort")

    async def _end_at_server(self, calls: Sequence[Call], everything: bool) -> None:
        """Returns when none of them is there any more. Raises TimeoutError, EngineFault."""
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            # The server does nothing for a call that has not reached it yet.
            while live := [call for call in calls if call.sent and not call.ended.is_set()]:
                await self._abort_at_server(live, everything)
                waits = [asyncio.ensure_future(call.settled.wait()) for call in live]
                await asyncio.wait(waits, timeout=ABORT_AGAIN_S)
                for wait in waits:
                    wait.cancel()

    async def _abort_at_server(self, calls: Sequence[Call], everything: bool) -> None:
        bodies = [{"abort_all": True}] if everything else [{"rid": call.rid} for call in calls]
        await asyncio.gather(*(self._link.client.post("/abort_request", body) for body in bodies))

    async def _forget(self, call: Call) -> None:
        """The server need not go on with a call that nobody listens to."""
        with contextlib.suppress(EngineFault):
            await self._abort_at_server([call], False)
