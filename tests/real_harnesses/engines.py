"""Engines that say what is scripted, and keep what they have sampled."""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from gyre.actors import handles
from gyre.cell.engine import Chunk, GenerateRequest, SampledLeg
from gyre.cell.messages import EndSession, ForgetSession, Generate
from tests.proxy.cells import Cell, EngineActor
from tests.real_harnesses.policy import Speaker


@dataclass
class Sampled:
    """What the engines sampled for a call. `lost` counts tokens that were sampled again, after a proxy's
    death."""

    prompt_ids: tuple[int, ...]
    lost: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass
class EngineLedger:
    """By call. `on_token` is told of the cell that draws a token, of the call and the token's position."""

    speaker: Speaker
    calls: dict[str, Sampled] = field(default_factory=dict)
    on_token: Callable[[int, str, int], None] = lambda cell, call, position: None

    def sample(
        self, cell: int, request: GenerateRequest, tokens: Sequence[int], version: int
    ) -> tuple[int, float]:
        position = len(tokens) - request.prompt_tokens
        token = self.speaker.answer(request)[position]
        # Depends on what came before, and fits a float32.
        drawn = zlib.crc32(array("i", tokens[-8:]).tobytes(), position)
        logprob = -(drawn % 4096) / 512
        prompt = request.prompt_ids[: request.prompt_tokens]
        sampled = self.calls.setdefault(request.call, Sampled(prompt))
        assert sampled.prompt_ids == prompt, f"{request.call} came back with another prompt"
        if position == 0 and sampled.token_ids:
            sampled.lost += len(sampled.token_ids)
            for values in (sampled.token_ids, sampled.logprobs, sampled.versions):
                values.clear()
        assert len(sampled.token_ids) == position, f"{request.call}: position {position} is not the next"
        sampled.token_ids.append(token)
        sampled.logprobs.append(logprob)
        sampled.versions.append(version)
        self.on_token(cell, request.call, position)
        return token, logprob


class SlowEngine(EngineActor):
    """Lets a call wait before its first token, as it is told."""

    def __init__(self, cell: Cell, waits_s: Callable[[str], float]) -> None:
        super().__init__(cell)
        self._waits_s = waits_s

    @handles(Generate)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        await asyncio.sleep(self._waits_s(message.request.call))
        async for chunk in self._cell.engine.generate(message.request):
            yield chunk

    @handles(EndSession, concurrent=True)
    async def end_session(self, message: EndSession) -> tuple[SampledLeg, ...]:
        return await self._cell.engine.end_session(message.session)

    @handles(ForgetSession, concurrent=True)
    async def forget_session(self, message: ForgetSession) -> None:
        self._cell.engine.forget_session(message.session)
