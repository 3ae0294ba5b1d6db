"""An engine in a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import msgspec

from gyre.actors import Actor, Ask, handles
from gyre.cell.engine.base import Chunk
from gyre.cell.engine.scripted import NoWeights, ScriptedEngine, answers
from gyre.cell.messages import Abort, Generate


class GetPid(Ask[int], frozen=True, kw_only=True):
    """Answers once a call has its first token."""


class CountingConfig(msgspec.Struct, frozen=True, kw_only=True):
    first_token: int
    tokens: int
    seconds_a_token: float


class CountingEngine(Actor):
    """Samples `tokens` ids upward from `first_token`, slowly."""

    def __init__(self, config: CountingConfig) -> None:
        last = config.first_token + config.tokens - 1
        self._engine = ScriptedEngine(
            answers(lambda _: range(config.first_token, last), end=last),
            vocab=100_000,
            eos_token_ids=(last,),
            pass_s=lambda decoding, prompt_tokens: config.seconds_a_token,
            open_weights=False,
        )
        self._sampling = asyncio.Event()

    async def started(self) -> None:
        await self._engine.wake(NoWeights(0))

    @handles(Generate)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        async for chunk in self._engine.generate(message.request):
            yield chunk
            self._sampling.set()

    @handles(Abort, concurrent=True)
    async def abort(self, message: Abort) -> None:
        await self._engine.abort(message.call)

    @handles(GetPid, concurrent=True)
    async def pid(self, message: GetPid) -> int:
        await self._sampling.wait()
        return os.getpid()
