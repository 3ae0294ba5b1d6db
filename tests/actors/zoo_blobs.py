"""An actor that carries blobs, in this process and in others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache

import msgspec

from gyre.actors import Actor, Ask, Blob, Ref, Stream, Tell, handles


@cache
def pattern(nbytes: int) -> bytes:
    """Bytes that differ from place to place, and by their number."""
    period = bytes((i * 7 + nbytes) % 251 for i in range(251))
    return (period * (nbytes // 251 + 1))[:nbytes]


class PorterConfig(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Many(Ask["Many"], frozen=True, kw_only=True):
    """Answered with itself."""

    blobs: list[Blob]
    named: dict[str, Blob]
    text: str
    maybe: Blob | None


class Echo(Ask[Blob], frozen=True, kw_only=True):
    blob: Blob


class Fill(Ask[Blob], frozen=True, kw_only=True):
    nbytes: int


class Sum(Ask[int], frozen=True, kw_only=True):
    """Of all its bytes."""

    blob: Blob


class Put(Tell, frozen=True, kw_only=True):
    name: str
    blob: Blob


class Keep(Tell, frozen=True, kw_only=True):
    blob: Blob


class Note(Tell, frozen=True, kw_only=True):
    text: str


class Notes(Ask[list[str]], frozen=True, kw_only=True):
    """Of Put and Note, in order."""


class Pour(Stream[Blob], frozen=True, kw_only=True):
    sizes: list[int]


class Stall(Ask[None], frozen=True, kw_only=True):
    """Until the test says so."""


class Relay(Ask[int], frozen=True, kw_only=True):
    to: Ref
    blob: Blob


class Porter(Actor):
    def __init__(self, config: PorterConfig = PorterConfig()) -> None:  # noqa: B008  frozen
        self.heard: list[str] = []
        self.kept: list[Blob] = []
        self.poured = 0
        self.stalled = asyncio.Event()
        self.go_on = asyncio.Event()

    @handles(Many)
    async def many(self, message: Many) -> Many:
        return message

    @handles(Echo)
    async def echo(self, message: Echo) -> Blob:
        return message.blob

    @handles(Fill)
    async def fill(self, message: Fill) -> Blob:
        return Blob(pattern(message.nbytes))

    @handles(Sum)
    async def add(self, message: Sum) -> int:
        return sum(bytes(message.blob.buffer)) if message.blob.nbytes < 2**22 else 0

    @handles(Put)
    async def put(self, message: Put) -> None:
        self.heard.append(message.name)

    @handles(Keep)
    async def keep(self, message: Keep) -> None:
        self.kept.append(message.blob)

    @handles(Note)
    async def note(self, message: Note) -> None:
        self.heard.append(message.text)

    @handles(Notes)
    async def notes(self, message: Notes) -> list[str]:
        return self.heard

    @handles(Pour)
    async def pour(self, message: Pour) -> AsyncIterator[Blob]:
        for size in message.sizes:
            self.poured += 1
            yield Blob(pattern(size))

    @handles(Stall)
    async def stall(self, message: Stall) -> None:
        self.stalled.set()
        await self.go_on.wait()

    @handles(Relay)
    async def relay(self, message: Relay) -> int:
        return await message.to.ask(Sum(blob=message.blob))
