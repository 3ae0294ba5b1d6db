"""Segments for whatever can be asked: one ask after another, and 64 in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from benchmarks.actors.messages import FIELDS, AskStep, TellStep

IN_FLIGHT = 64

Make = Callable[..., Any]


class Asked(Protocol):
    """A Ref, or a bare peer."""

    def ask(self, message: Any) -> Awaitable[Any]: ...


class Told(Asked, Protocol):
    def tell(self, message: Any) -> Awaitable[None]: ...


async def sequential(asked: Asked, count: int, make: Make = AskStep) -> None:
    """The same message again and again: making one is not the runtime's work."""
    message = make(seq=0, **FIELDS)
    for _ in range(count):
        await asked.ask(message)


async def in_flight(asked: Asked, count: int, make: Make = AskStep) -> None:
    """Each a message of its own: nothing is batched by the user."""
    seqs = iter(range(count))

    async def worker() -> None:
        for seq in seqs:
            await asked.ask(make(seq=seq, **FIELDS))

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


async def tells(told: Told, count: int, tell: Make = TellStep, ask: Make = AskStep) -> None:
    """Of one message, until the last has been handled."""
    message = tell(seq=0, **FIELDS)
    for _ in range(count):
        await told.tell(message)
    await told.ask(ask(seq=1, **FIELDS))


async def p50_s(asked: Asked, count: int, make: Make = AskStep) -> float:
    """Of single asks, in seconds."""
    took = []
    for seq in range(count):
        message = make(seq=seq, **FIELDS)
        start = perf_counter()
        await asked.ask(message)
        took.append(perf_counter() - start)
    return median(took)
