"""The one message of all segments and peers: 64 bytes of msgpack."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gyre.actors import Actor, Ask, Tell, handles


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's step."""

    seq: int
    actor: str
    step: int
    reward: float
    tokens: list[int]


class AskStep(Step, Ask[Step], frozen=True, kw_only=True):
    """Answered with itself."""


class TellStep(Step, Tell, frozen=True, kw_only=True):
    """Counted."""


class CpuSeconds(Ask[float], frozen=True, kw_only=True):
    """Of the actor's process, so far."""


FIELDS: dict[str, Any] = {"actor": "harness/g00012", "step": 7, "reward": 0.5, "tokens": [11, 222, 3333, 44]}


class Echo(Actor):
    """Does nothing but answer."""

    def __init__(self) -> None:
        self.told = 0

    @handles(AskStep)
    async def step(self, message: AskStep) -> Step:
        return message

    @handles(TellStep)
    async def count(self, message: TellStep) -> None:
        self.told += 1


class Clocked(Actor):
    """Knows what its process has cost."""

    @handles(CpuSeconds)
    async def cpu(self, message: CpuSeconds) -> float:
        return time.process_time()
