"""Actors of a simulated job, each in a process of its own: engines, a proxy, who keeps what is recorded."""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gyre.actors import Actor, Ask, Ref, Tell, handles
from gyre.actors.testing import Host
from gyre.actors.testing.loop import HOST
from gyre.cell.engine import Chunk, GenerateRequest, SampledLeg, SamplingParams
from gyre.cell.engine.scripted import NoWeights, ScriptedEngine
from gyre.cell.messages import Abort, EndSession, ForgetSession, Generate
from gyre.proxy.calls import CallDesk
from gyre.proxy.codec import Codec
from gyre.proxy.conversation import CallRequest, Completion, Conversation, Message
from gyre.proxy.messages import CloseExecution, OpenExecution
from gyre.proxy.restoring import restore
from gyre.proxy.routes import Routes
from gyre.schedule.messages import CloseRoute, OpenRoute, RouteClosed
from gyre.trajectory.book import Book
from gyre.trajectory.records import CallRecord, ExecutionSpec, RecordCall, RecordSampled

VOCAB = 400
SECONDS_A_TOKEN = 0.01


@dataclass
class Life:
    """An engine's, of weights of a version that no other engine has."""

    engine: ScriptedEngine
    host: Host


# A simulation is one process: what its engines have is found here, by version.
LIVES: dict[int, Life] = {}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    version: int


class AbortAll(Tell, frozen=True, kw_only=True):
    """To an engine: end all calls, unasked."""


def sample(request: GenerateRequest, tokens: Sequence[int], version: int) -> tuple[int, float]:
    """Depends on all before and on the version; now and then it ends the answer."""
    drawn = zlib.crc32(array("i", tokens).tobytes(), version)
    ends = request.sampling.stop_token_ids[0]
    return (ends if drawn % 29 == 0 else drawn % VOCAB), -(drawn % 1000) / 7.0


class EngineActor(Actor):
    """It tells of several tokens at a time, so that some are sampled that nobody has heard of."""

    def __init__(self, config: EngineConfig) -> None:
        self._version = config.version
        self._engine = ScriptedEngine(
            sample,
            vocab=1000,
            pass_s=lambda decoding, prompt_tokens: SECONDS_A_TOKEN,
            chunk_interval_s=5 * SECONDS_A_TOKEN,
            open_weights=False,
            keep_tokens=True,
        )

    async def started(self) -> None:
        host = HOST.get()
        assert host is not None
        LIVES[self._version] = Life(self._engine, host)
        await self._engine.wake(NoWeights(self._version))

    @handles(Generate)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        async for chunk in self._engine.generate(message.request):
            yield chunk

    @handles(Abort, concurrent=True)
    async def abort(self, message: Abort) -> None:
        await self._engine.abort(message.call)

    @handles(AbortAll, concurrent=True)
    async def abort_all(self, message: AbortAll) -> None:
        await self._engine.abort_all()

    @handles(EndSession, concurrent=True)
    async def end_session(self, message: EndSession) -> tuple[SampledLeg, ...]:
        return await self._engine.end_session(message.session)

    @handles(ForgetSession, concurrent=True)
    async def forget_session(self, message: ForgetSession) -> None:
        self._engine.forget_session(message.session)


class Chat(Ask[Completion], frozen=True, kw_only=True):
    """To a proxy, as over HTTP."""

    key: str
    messages: tuple[Message, ...]


class Open(Ask[str], frozen=True, kw_only=True):
    """Answers the execution's key."""

    opening: OpenExecution


class Restore(Ask[None], frozen=True, kw_only=True):
    """To a proxy's next life: an execution that is open, its recorded calls, and the delivered ones."""

    opening: OpenExecution
    records: tuple[CallRecord, ...]
    delivered: frozenset[str]
    lives: int


class ProxyProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    keeper: Ref


class ProxyProcess(Actor):
    """The proxy without HTTP, whose sockets are no simulated ones."""

    def __init__(self, config: ProxyProcessConfig) -> None:
        self._config = config
        self._routes = Routes(60.0)

    async def started(self) -> None:
        self._desk = CallDesk(
            codec=Codec(Path(self._config.folder)),
            routes=self._routes,
            trajectory=self._config.keeper,
            run=self.context.run,
            sampling=SamplingParams(seed=7, max_new_tokens=40),
            window_tokens=2048,
            model_name="policy",
            delivered=self._delivered,
        )

    async def _delivered(self, execution: str, call: str) -> None:
        """Whoever has asked knows."""

    @handles(Open)
    async def open(self, message: Open) -> str:
        return self._desk.open(message.opening).key

    @handles(Restore)
    async def restore(self, message: Restore) -> None:
        execution = self._desk.open(message.opening)
        restore(self._desk, execution, message.records, message.delivered, message.lives)

    @handles(CloseExecution, concurrent=True)
    async def close(self, message: CloseExecution) -> None:
        await self._desk.close(message.execution)

    @handles(OpenRoute)
    async def open_route(self, message: OpenRoute) -> None:
        self._routes.open(message)

    @handles(CloseRoute, concurrent=True)
    async def close_route(self, message: CloseRoute) -> RouteClosed:
        return await self._routes.close(message.cell, lost=message.lost)

    @handles(Chat, concurrent=True)
    async def chat(self, message: Chat) -> Completion:
        execution = self._desk.identify(message.key)
        asked = CallRequest(conversation=Conversation(messages=message.messages), model="policy")
        flight = await self._desk.admit(execution, asked)
        completion = await asyncio.shield(flight.done)
        await self._desk.delivered(execution, flight)
        return completion


@dataclass
class Kept:
    """What is durable. `undelivered` is by execution's attempt, as the book said it last."""

    book: Book = field(default_factory=Book)
    records: list[CallRecord] = field(default_factory=list)
    undelivered: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    specs: dict[str, ExecutionSpec] = field(default_factory=dict)

    def open(self, spec: ExecutionSpec) -> None:
        self.specs[spec.execution] = spec
        self.book.open(spec)

    def undelivered_tokens(self) -> Counter[str]:
        """By call."""
        found = Counter[str]()
        for tokens in self.undelivered.values():
            found.update(tokens)
        return found


class Keeper(Actor):
    """The book as the TrajectoryActor has it; its journal is this process."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    @handles(RecordCall, concurrent=True)
    async def record(self, message: RecordCall) -> None:
        self._kept.book.record(message.record)
        self._kept.records.append(message.record)
        await asyncio.sleep(SECONDS_A_TOKEN)

    @handles(RecordSampled, concurrent=True)
    async def sampled(self, message: RecordSampled) -> None:
        found = self._kept.book.sampled(message)
        spec = self._kept.specs[message.execution]
        self._kept.undelivered.setdefault((spec.execution, spec.attempt), {}).update(found)
        await asyncio.sleep(SECONDS_A_TOKEN)
