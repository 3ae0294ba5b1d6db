"""Memory of others that readers keep mapped from one operation to the next. Who owns it has them let go
before it frees it, and waits for their answers; the end of a lane is an answer too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from gyre.rdma.dialling import Lanes
from gyre.rdma.frames import BadFrame, Done, Drop, Hold
from gyre.rdma.lane import Lane
from gyre.rdma.stages import Rejected, expect

# A reader that stands still keeps no owner for longer.
DROP_TIMEOUT_S = 5.0

log = structlog.get_logger()


class _Reader:
    """A lane on which a reader hears what it has to let go of, one after the other."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.turn = asyncio.Lock()
        self.answer: asyncio.Future[None] | None = None

    def answered(self) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(None)


class Readers:
    """At the owner: those that may have something mapped."""

    def __init__(self) -> None:
        self._readers: set[_Reader] = set()

    async def serve(self, lane: Lane) -> None:
        """As long as the lane is there. Raises LaneLost, BadFrame."""
        reader = _Reader(lane)
        self._readers.add(reader)
        try:
            await lane.send(Done())
            while True:
                expect(await lane.receive(), Done)
                reader.answered()
        finally:
            self._readers.discard(reader)
            reader.answered()

    async def drop(self, allocation: bytes) -> None:
        """Returns when no reader has it mapped; whoever does not answer in time is hung up on."""
        await asyncio.gather(*(self._drop(reader, allocation) for reader in tuple(self._readers)))

    async def _drop(self, reader: _Reader, allocation: bytes) -> None:
        async with reader.turn:
            if reader not in self._readers:
                return
            reader.answer = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(DROP_TIMEOUT_S):
                    await reader.lane.send(Drop(allocation))
                    await reader.answer
            except TimeoutError:
                log.warning("rdma_reader_holds_on", peer=reader.lane.peer, after_s=DROP_TIMEOUT_S)
                reader.lane.close()
            except OSError:
                """It is gone."""


class Owner:
    """At a reader: a lane on which an owner says what to let go of."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.ended = False
        self._over = False
        self._heard = asyncio.Event()

    def tell(self, *, over: bool = False) -> None:
        """Something was heard, and done."""
        self._over = over
        self._heard.set()
        self._heard = asyncio.Event()

    async def caught_up(self) -> None:
        """What has come is heard: nothing is used that should have been let go of."""
        while not self._over and (self.ended or not self.lane.idle):
            await self._heard.wait()


LetGo = Callable[[str, bytes | None], Awaitable[None]]


class Owners:
    """At a reader. `let_go` is called with the owner's address and an allocation of it, or None for all, and
    returns when that is not mapped any more."""

    def __init__(self, lanes: Lanes, let_go: LetGo) -> None:
        self._lanes = lanes
        self._let_go = let_go
        self._owners: dict[str, asyncio.Future[Owner | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def heard(self, peer: str) -> Owner | None:
        """The owner, if it tells when its memory goes; until it has `ended` that may stay mapped. All that it
        has told until now is done."""
        found = self._owners.get(peer)
        if found is None:
            loop = asyncio.get_running_loop()
            found = self._owners[peer] = loop.create_future()
            task = loop.create_task(self._hear(peer, found), name=f"hear of {peer}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        owner = await asyncio.shield(found)
        if owner is not None:
            await owner.caught_up()
        return owner

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hear(self, peer: str, found: asyncio.Future[Owner | None]) -> None:
        owner: Owner | None = None
        try:
            lane = await self._lanes.another(peer)
            owner = Owner(lane)
            await lane.send(Hold())
            expect(await lane.receive(), Done)
            found.set_result(owner)
            while True:
                drop = expect(await lane.receive(), Drop)
                await self._let_go(peer, drop.allocation)
                owner.tell()
                await lane.send(Done())
        except (BadFrame, Rejected, OSError, ValueError) as error:
            log.debug("rdma_owner_lost", peer=peer, why=str(error))
        finally:
            del self._owners[peer]
            if not found.done():
                found.set_result(None)
            if owner is not None:
                owner.ended = True
                with contextlib.suppress(OSError):
                    await self._let_go(peer, None)
                owner.lane.close()
                owner.tell(over=True)
