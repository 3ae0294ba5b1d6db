"""An engine in a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import msgspec

from gyre.actors import Actor, Ask, handles
from gyre.cell.engine.base import Chunk
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
        self._config = config
        self._sampling = asyncio.Event()

    @handles(Generate)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        config, request = self._config, message.request
        start = len(request.prompt_ids) - request.prompt_tokens
        for position in range(start, config.tokens):
            await asyncio.sleep(config.seconds_a_token)
            yield Chunk(
                token_ids=(config.first_token + position,),
                logprobs=(-1.0,),
                versions=(0,),
                finish_reason="stop" if position == config.tokens - 1 else None,
            )
            self._sampling.set()

    @handles(Abort)
    async def abort(self, message: Abort) -> None:
        """This engine only ever dies."""

    @handles(GetPid, concurrent=True)
    async def pid(self, message: GetPid) -> int:
        await self._sampling.wait()
        return os.getpid()
