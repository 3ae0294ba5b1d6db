"""Actors that the tests start, in this process and in others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import msgspec

from gyre.actors import Actor, Ask, Ref, Stream, Tell, handles


class CounterConfig(msgspec.Struct, frozen=True, kw_only=True):
    start: int = 0
    peer: Ref | None = None


class Add(Ask[int], frozen=True, kw_only=True):
    amount: int


class AddToPeer(Ask[int], frozen=True, kw_only=True):
    amount: int


class Bump(Tell, frozen=True, kw_only=True):
    amount: int = 1


class Total(Ask[int], frozen=True, kw_only=True):
    pass


class Count(Stream[int], frozen=True, kw_only=True):
    upto: int


class Fail(Ask[None], frozen=True, kw_only=True):
    text: str


class Crash(Tell, frozen=True, kw_only=True):
    text: str = "crash"


class Sleep(Ask[None], frozen=True, kw_only=True):
    seconds: float


class Pid(Ask[int], frozen=True, kw_only=True):
    pass


class Counter(Actor):
    def __init__(self, config: CounterConfig) -> None:
        self.total = config.start
        self.peer = config.peer

    @handles(Add)
    async def add(self, message: Add) -> int:
        self.total += message.amount
        return self.total

    @handles(AddToPeer)
    async def add_to_peer(self, message: AddToPeer) -> int:
        assert self.peer is not None
        return await self.peer.ask(Add(amount=message.amount))

    @handles(Bump)
    async def bump(self, message: Bump) -> None:
        self.total += message.amount

    @handles(Total, concurrent=True)
    async def get_total(self, message: Total) -> int:
        return self.total

    @handles(Count)
    async def count(self, message: Count) -> AsyncIterator[int]:
        for i in range(message.upto):
            yield i

    @handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise ValueError(message.text)

    @handles(Crash)
    async def crash(self, message: Crash) -> None:
        raise ValueError(message.text)

    @handles(Sleep)
    async def sleep(self, message: Sleep) -> None:
        await asyncio.sleep(message.seconds)

    @handles(Pid, concurrent=True)
    async def pid(self, message: Pid) -> int:
        return os.getpid()
