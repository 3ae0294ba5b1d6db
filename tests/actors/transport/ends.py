"""Channels without nodes."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from gyre.actors.transport import Channel, Listener, Transport
from tests.actors.world import World


class End:
    """Keeps what it hears. `deaf`: refuses to hear, with this error."""

    def __init__(self) -> None:
        self.channel: Channel
        self.heard: list[bytes] = []
        self.lost_with: list[str] = []
        self.deaf: Exception | None = None
        self._unread: asyncio.Queue[bytes] = asyncio.Queue()
        self._lost = asyncio.Event()

    def received(self, payload: memoryview) -> None:
        assert not self.lost_with, "a frame after the end"
        if self.deaf is not None:
            raise self.deaf
        self.heard.append(bytes(payload))
        self._unread.put_nowait(self.heard[-1])

    def lost(self, why: str) -> None:
        self.lost_with.append(why)
        self._lost.set()

    async def next(self) -> bytes:
        async with asyncio.timeout(20):
            return await self._unread.get()

    async def lost_why(self) -> str:
        """Waits for the end; why."""
        async with asyncio.timeout(20):
            await self._lost.wait()
        await asyncio.sleep(0.02)
        (why,) = self.lost_with
        return why


class Ends:
    """Two transports of a kind; the second listens."""

    def __init__(self, kind: str) -> None:
        self.world = World(kind)
        self.accepted: asyncio.Queue[End] = asyncio.Queue()
        self.listener: Listener

    async def __aenter__(self) -> Self:
        self.dialler: Transport = self.world.transport("dialler")
        self.answerer: Transport = self.world.transport("answerer")
        self.listener = await self.answerer.listen("answerer", self.accept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.listener.close()
        await self.dialler.close()
        await self.answerer.close()

    @property
    def rest(self) -> str:
        """What to dial."""
        return self.listener.endpoint.partition(":")[2]

    def accept(self, channel: Channel) -> End:
        end = End()
        end.channel = channel
        self.accepted.put_nowait(end)
        return end

    async def dial(self, limit_bytes: int = 4096) -> tuple[End, End]:
        """Both ends of a new connection."""
        mine = End()
        async with asyncio.timeout(20):
            mine.channel = await self.dialler.dial(self.rest, mine)
            theirs = await self.accepted.get()
        mine.channel.limit_bytes = theirs.channel.limit_bytes = limit_bytes
        return mine, theirs

    async def meet_and_part(self) -> None:
        mine, theirs = await self.dial()
        mine.channel.close()
        await mine.lost_why()
        await theirs.lost_why()
