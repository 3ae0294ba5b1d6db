"""An open execution: its recorded calls, and those whose answer has not reached its harness yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import msgspec

from gyre.proxy.compactions import Compactions
from gyre.proxy.conversation import CallError, CallRequest, Completion, Opening
from gyre.proxy.matching import ConversationIndex, repetition_key
from gyre.proxy.messages import CompactionLimit
from gyre.proxy.recent import WarmPaths
from gyre.proxy.routes import Sample
from gyre.trajectory.records import CallRecord, call_name

# A harness that hangs up and asks again can be heard in the wrong order: its new connection first.
_HANG_UP_GRACE_S = 0.05
# More than an execution has calls in flight.
_NAMES_OF_A_LIFE = 1000


class Flight:
    """A call from its arrival until its answer is delivered. `key` is what it asks, `digests` those of its
    conversation; `clients` wait for it now, none when all have hung up. `sample` is what was sampled so
    far, `prompt` what is known before that. `done` has the answer once it is recorded, or a CallError;
    `unfinished` what was sampled where it is cancelled or fails."""

    def __init__(self, call: str, request: CallRequest, digests: list[bytes], key: bytes) -> None:
        self.call = call
        self.key = key
        self.request = request
        self.digests = digests
        self.sample = Sample(heard=self._ring)
        self.prompt: Opening | None = None
        self.done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(lambda _: self._ring())
        self._waiters: list[asyncio.Future[None]] = []
        self.clients = 1
        self.repeated = False
        self.task: asyncio.Task[None] | None = None
        self.unfinished: CallRecord | None = None

    async def complete(self) -> Completion:
        """Waits for the answer. Raises CallError."""
        # Others may wait too: whoever is cancelled here does not cancel it.
        await asyncio.wait({self.done})
        return self.done.result()

    async def news(self, tokens: int, timeout_s: float) -> None:
        """Waits until it has more than so many tokens or is done, but not longer than that."""
        if len(self.sample.token_ids) > tokens or self.done.done():
            return
        # Streams wait so for each of their tokens, which asyncio.timeout would make dear.
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(timeout_s, _release, waiter)
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    def _ring(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _release(waiter)

    @property
    def opening(self) -> Opening:
        """Once something was sampled."""
        assert self.prompt is not None
        return msgspec.structs.replace(self.prompt, cached_tokens=self.sample.cached_tokens)

    def fail(self, error: CallError) -> None:
        """Its clients get this error, unless they have an answer or an error already."""
        if not self.done.done():
            self.done.set_exception(error)
            # All clients may have hung up; then nobody else retrieves it.
            self.done.exception()


class Execution:
    """An open execution: its recorded calls, and its flights by what they ask."""

    def __init__(
        self,
        name: str,
        attempt: int,
        key: str,
        refill: int = 0,
        compactions: CompactionLimit | None = None,
        warm: WarmPaths | None = None,
    ) -> None:
        self.name = name
        self.attempt = attempt
        self.refill = refill
        self.key = key
        self.closed = False
        # Which engines its calls have been at is known of this life of the proxy only.
        self.lived_before = False
        self.index = ConversationIndex(warm)
        self.compactions = Compactions(name, compactions)
        self.prompts: Counter[bytes] = Counter()
        self._flights: dict[bytes, list[Flight]] = {}
        self._undelivered: dict[bytes, list[Completion]] = {}
        self._calls = 0
        self._hung_up = asyncio.Event()

    @property
    def flights(self) -> list[Flight]:
        return [flight for flights in self._flights.values() for flight in flights]

    def has_made(self, call: str) -> None:
        """Calls that are made from now on have other names than this one and those that were in flight with
        it, of which nothing is known."""
        made = int(call.rpartition("-")[2])
        self._calls = max(self._calls, (made // _NAMES_OF_A_LIFE + 1) * _NAMES_OF_A_LIFE)

    def has_lived(self, lives: int) -> None:
        """And other names than those of earlier lives of the proxy that recorded none of its calls: engines
        know them."""
        self.lived_before = lives > 0
        self._calls = max(self._calls, lives * _NAMES_OF_A_LIFE)

    def keep_undelivered(self, key: bytes, completion: Completion) -> None:
        """Who asks this gets that answer, once."""
        self._undelivered.setdefault(key, []).append(completion)

    def begin(self, request: CallRequest, digests: list[bytes]) -> Flight:
        """A new call."""
        call = call_name(self.name, self.attempt, self._calls)
        self._calls += 1
        flight = Flight(call, request, digests, repetition_key(request, digests[-1]))
        self._flights.setdefault(flight.key, []).append(flight)
        return flight

    async def find_repeated(self, request: CallRequest, digests: list[bytes]) -> Flight | None:
        """The call whose answer reached nobody and which this request asks for again. Where the same is
        asked by a client that still waits, it is another call: two sub-agents may begin alike."""
        key = repetition_key(request, digests[-1])
        if completions := self._undelivered.get(key):
            return self._redelivered(completions.pop(0), request, digests, key)
        with suppress(TimeoutError):
            async with asyncio.timeout(_HANG_UP_GRACE_S):
                while flights := self._flights.get(key):
                    for flight in flights:
                        if flight.clients == 0 or request.is_retry:
                            flight.clients += 1
                            return flight
                    await self._hung_up.wait()
        return None

    def _redelivered(
        self, completion: Completion, request: CallRequest, digests: list[bytes], key: bytes
    ) -> Flight:
        flight = Flight(completion.call, request, digests, key)
        flight.done.set_result(completion)
        self._flights.setdefault(key, []).append(flight)
        return flight

    def hung_up(self, flight: Flight) -> None:
        """A client of it is gone before it had the answer."""
        flight.clients -= 1
        self._hung_up.set()
        self._hung_up = asyncio.Event()

    def forget(self, flight: Flight) -> None:
        """It was delivered or failed: whoever asks the same again asks for a new sample."""
        flights = self._flights.get(flight.key, [])
        if flight in flights:
            flights.remove(flight)
        if not flights:
            self._flights.pop(flight.key, None)


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
