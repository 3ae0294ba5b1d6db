"""A real engine actor that samples what a script says, and a trajectory actor that keeps what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from gyre.actors import Actor, Down, Ref, Tell, handles
from gyre.cell.engine import SampledLeg
from gyre.cell.engine.base import Chunk, EngineAsleep, GenerateRequest
from gyre.cell.messages import Abort, EndSession, Generate
from gyre.trajectory.records import CallRecord, CallRetried, RecordCall


class Die(Tell, frozen=True, kw_only=True):
    """To a scripted engine."""


@dataclass
class Script:
    """What the policy answers to a prompt's text (as text or ids), one token a chunk. At `pause_at` tokens
    of a call the engine sets `paused` and waits for `go`. `asleep` names engines that refuse, `failing`
    those that raise at their second token, `refusal` is raised at once; engines of a `deaf` script hear no
    abort. `ended` are sessions that an engine was told are over."""

    folder: Path
    answer: Callable[[str], str | list[int]]
    requests: list[tuple[str, GenerateRequest]] = field(default_factory=list)
    pause_at: int | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    asleep: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    refusal: Exception | None = None
    ended: list[str] = field(default_factory=list)
    deaf: bool = False

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def text(self, ids: tuple[int, ...] | list[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def ids(self, request: GenerateRequest) -> list[int]:
        """The whole answer to a call, whatever part of it is sampled already."""
        answer = self.answer(self.text(request.prompt_ids[: request.prompt_tokens]))
        return answer if isinstance(answer, list) else list(self.tokenizer.encode(answer).ids)

    def engines_used(self) -> list[str]:
        return [engine for engine, _ in self.requests]


class ScriptedEngine(Actor):
    def __init__(self, name: str, version: int, script: Script) -> None:
        self._name = name
        self._version = version
        self._script = script
        self._aborts: dict[str, asyncio.Event] = {}

    @handles(Generate)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        request, script = message.request, self._script
        script.requests.append((self._name, request))
        script.asked.set()
        if self._name in script.asleep:
            raise EngineAsleep
        if script.refusal is not None:
            raise script.refusal
        abort = self._aborts[request.call] = asyncio.Event()
        ids = script.ids(request)
        start = len(request.prompt_ids) - request.prompt_tokens
        end = min(len(ids), request.sampling.max_new_tokens)
        assert list(request.prompt_ids[request.prompt_tokens :]) == ids[:start]
        for position in range(start, end):
            if self._name in script.failing and position == 1:
                raise RuntimeError("a scripted failure")
            if position == script.pause_at and not script.go.is_set():
                script.paused.set()
                await self._aborted_or_released(abort)
            if abort.is_set():
                yield Chunk(token_ids=(), logprobs=(), versions=(), finish_reason="abort")
                return
            yield Chunk(
                token_ids=(ids[position],),
                logprobs=(-position - 0.5,),
                versions=(self._version,),
                finish_reason=None if position < end - 1 else "stop" if end == len(ids) else "length",
                cached_tokens=len(request.prompt_ids) - 1,
            )

    async def _aborted_or_released(self, abort: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(event.wait()) for event in (abort, self._script.go)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    @handles(Abort)
    async def abort(self, message: Abort) -> None:
        if not self._script.deaf:
            self._aborts[message.call].set()

    @handles(EndSession)
    async def end_session(self, message: EndSession) -> tuple[SampledLeg, ...]:
        self._script.ended.append(message.session)
        return ()

    @handles(Die)
    async def die(self, message: Die) -> None:
        self.context.stop()


class Mourner(Actor):
    """Knows of engines' deaths, so that they are nobody's crash."""

    def __init__(self, engines: list[Ref]) -> None:
        self._engines = engines

    async def started(self) -> None:
        for engine in self._engines:
            self.context.monitor(engine)

    @handles(Down)
    async def mourn(self, message: Down) -> None:
        """Nothing is to be done."""


class KeepingTrajectory(Actor):
    """Answers a record when `durable` is set, as a journal does."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    @handles(RecordCall, concurrent=True)
    async def record(self, message: RecordCall) -> None:
        self._kept.asked.set()
        await self._kept.durable.wait()
        if self._kept.full:
            raise OSError("database or disk is full")
        self._kept.records.append(message.record)

    @handles(CallRetried)
    async def retried(self, message: CallRetried) -> None:
        self._kept.retried.append(message.call)


@dataclass
class Kept:
    records: list[CallRecord] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    durable: asyncio.Event = field(default_factory=asyncio.Event)
    full: bool = False

    def __post_init__(self) -> None:
        self.durable.set()

    def path(self, call: str | None) -> list[int]:
        """Prompt and output of a recorded call."""
        by_call = {record.call: record for record in self.records}
        pieces: list[int] = []
        while call is not None:
            record = by_call[call]
            pieces = [*record.new_input_ids, *record.output_ids, *pieces]
            call = record.parent
        return pieces
