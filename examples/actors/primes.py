"""The actor of `process.py`, in a module that its process can import."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import msgspec

from gyre.actors import Actor, Ask, Stream, handles


class Primes(Stream[int], frozen=True, kw_only=True):
    below: int


class Pid(Ask[int], frozen=True, kw_only=True):
    pass


class FinderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What crosses to the process: plain data, Paths and Refs."""

    first: int = 2


class Finder(Actor):
    def __init__(self, config: FinderConfig) -> None:
        self.first = config.first

    @handles(Primes)
    async def primes(self, message: Primes) -> AsyncIterator[int]:
        for number in range(self.first, message.below):
            if all(number % factor for factor in range(2, int(number**0.5) + 1)):
                yield number

    @handles(Pid)
    async def pid(self, _: Pid) -> int:
        return os.getpid()
