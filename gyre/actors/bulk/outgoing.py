"""Blobs on their way to a peer: named in a message, sent when the peer wants them."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from gyre.actors.blob import Blob
from gyre.actors.bulk.memory import Pool, size_class
from gyre.actors.bulk.pieces import PIECE_BYTES, Pieces
from gyre.actors.bulk.shared import Segment
from gyre.actors.errors import BadMessage, LinkLost
from gyre.actors.wire import INLINE_BYTES, MAX_BLOBS, MAX_BLOBS_BYTES, Loaded, Parcel, Share, Unshare

if TYPE_CHECKING:
    from gyre.actors.link import Link

# What a peer may hold of the shared memory of one link; what is over goes over the connection.
SHARED_BYTES = 2**30
SHARED_SEGMENTS = 64
# A smaller blob is not worth a segment.
SHARED_FROM_BYTES = 32 * 1024


class _Cargo:
    __slots__ = ("blob", "gone", "id", "message")

    def __init__(self, id: int, message: int, blob: memoryview) -> None:
        self.id = id
        self.message = message
        self.blob = blob
        self.gone = False  # it is there, or nobody wants it any more


class Outgoing:
    """Of one link. `unshipped` counts, by message, the blobs that are not there yet."""

    def __init__(self, link: Link, shared: SharedMemory, pieces: Callable[[], Awaitable[Pieces]]) -> None:
        self._link = link
        self._shared = shared
        self._pieces = pieces
        self._cargo: dict[int, _Cargo] = {}
        self._last = 0
        self._wanted: deque[_Cargo] = deque()
        self._written: dict[int, _Cargo] = {}
        self._task: asyncio.Task[None] | None = None
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self.unshipped: dict[int, int] = {}

    def pack(self, message: int, blobs: list[Blob]) -> tuple[Parcel, ...]:
        """What stands for the blobs in the message. BadMessage where they are too many or too large."""
        total = sum(blob.nbytes for blob in blobs)
        if total > MAX_BLOBS_BYTES or len(blobs) > MAX_BLOBS:
            raise BadMessage(
                f"{len(blobs)} blobs of {total} bytes in one message, "
                f"{MAX_BLOBS} of {MAX_BLOBS_BYTES} allowed: send it in parts"
            )
        try:
            views = [blob.buffer for blob in blobs]
        except ValueError as error:
            raise BadMessage(str(error)) from None
        room = INLINE_BYTES
        parcels = []
        for view in views:
            if view.nbytes <= room:
                room -= view.nbytes
                parcels.append(Parcel(view.nbytes, bytes(view)))
            else:
                self._last += 1
                self._cargo[self._last] = _Cargo(self._last, message, view)
                self.unshipped[message] = self.unshipped.get(message, 0) + 1
                parcels.append(Parcel(view.nbytes, b""))
        return tuple(parcels)

    def want(self, first: int, count: int) -> None:
        """The peer has room for these, or they are no longer there. BadMessage where they never were."""
        if count < 1 or count > MAX_BLOBS or first < 1 or first + count - 1 > self._last:
            raise BadMessage(f"{count} blobs from {first} wanted, there were {self._last}")
        for id in range(first, first + count):
            cargo = self._cargo.pop(id, None)
            if cargo is not None:
                self._wanted.append(cargo)
        if self._task is None and self._wanted:
            node = self._link.node
            self._task = node.loop.create_task(self._ship_all(), name="blobs", context=node.context)

    def drop(self, message: int) -> None:
        """Nobody waits for that message any more."""
        if message not in self.unshipped:
            return
        for cargo in [*self._cargo.values(), *self._wanted, *self._written.values()]:
            if cargo.message == message and not cargo.gone:
                self._cargo.pop(cargo.id, None)
                self._written.pop(cargo.id, None)
                self._gone(cargo)

    def waits_to_leave(self, message: int) -> bool:
        """Whether a blob of it has not left yet, so that the peer cannot have it whole."""
        waiting = [*self._cargo.values(), *(cargo for cargo in self._wanted if cargo.id not in self._written)]
        return any(cargo.message == message and not cargo.gone for cargo in waiting)

    def landed(self, id: int) -> None:
        """The peer has it. One that was dropped meanwhile is no longer known."""
        cargo = self._written.pop(id, None)
        if cargo is not None:
            self._gone(cargo)

    async def left(self, message: int) -> None:
        """Until all blobs of a message are there, or it was dropped, or the link is lost."""
        if message in self.unshipped:
            waiter = self._link.node.loop.create_future()
            self._waiting.setdefault(message, []).append(waiter)
            await waiter

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._cargo.clear()
        self._wanted.clear()
        self._written.clear()
        for message in [*self.unshipped]:
            self._settle(message)

    # --- shipping -------------------------------------------------------------------------------

    async def _ship_all(self) -> None:
        try:
            while self._wanted:
                cargo = self._wanted[0]
                if not cargo.gone and not await self._ship_shared(cargo):
                    await self._ship_pieces(cargo)
                self._wanted.popleft()
        except LinkLost as error:
            self._link.freight.lost(str(error))
        finally:
            self._task = None

    async def _ship_shared(self, cargo: _Cargo) -> bool:
        """Whether it went through shared memory, or need not go at all."""
        segment = await self._shared.take(cargo.blob.nbytes)
        if segment is None:
            return False
        blob = cargo.blob
        try:
            for at in range(0, blob.nbytes, PIECE_BYTES):
                segment.write(at, blob[at : at + PIECE_BYTES])
                await asyncio.sleep(0)
                if cargo.gone:
                    break
        except OSError:
            self._shared.back(segment.id)
            return False
        except asyncio.CancelledError:
            self._shared.back(segment.id)
            raise
        if cargo.gone:
            self._shared.back(segment.id)
        else:
            self._link.send(Loaded(0, cargo.id, segment.id))
            self._gone(cargo)
        return True

    async def _ship_pieces(self, cargo: _Cargo) -> None:
        pieces, blob = await self._pieces(), cargo.blob
        for at in range(0, blob.nbytes, pieces.piece_bytes):
            if cargo.gone:
                return
            piece = blob[at : at + pieces.piece_bytes]
            if at + len(piece) == blob.nbytes:
                self._written[cargo.id] = cargo
            await pieces.write(cargo.id, at, piece)

    def _gone(self, cargo: _Cargo) -> None:
        if cargo.gone:
            return
        cargo.gone = True
        left = self.unshipped.get(cargo.message, 0) - 1
        if left > 0:
            self.unshipped[cargo.message] = left
        else:
            self._settle(cargo.message)

    def _settle(self, message: int) -> None:
        self.unshipped.pop(message, None)
        for waiter in self._waiting.pop(message, ()):
            if not waiter.done():
                waiter.set_result(None)


class SharedMemory:
    """The shared memory that this side writes to, as long as the peer can open it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.possible = False
        self._last = 0
        self._busy: dict[int, Segment] = {}
        self._opening: dict[int, asyncio.Future[bool]] = {}
        self._idle: Pool[Segment] | None = None

    async def take(self, nbytes: int) -> Segment | None:
        """Room for so many bytes; None where there is none, or none that the peer can open."""
        if not self.possible or nbytes < SHARED_FROM_BYTES:
            return None
        if self._idle is None:
            self._idle = Pool(self._link.node.loop, self._link.node.context, self._forget)
        size = size_class(nbytes)
        segment = self._idle.take(size)
        if segment is not None:
            self._busy[segment.id] = segment
            return segment
        busy_bytes = sum(segment.nbytes for segment in self._busy.values())
        if len(self._busy) >= SHARED_SEGMENTS or busy_bytes + size > SHARED_BYTES:
            return None
        return await self._make(size)

    async def _make(self, nbytes: int) -> Segment | None:
        node = self._link.node
        self._last += 1
        try:
            segment = Segment(self._last, f"gyre-{node.nonce().hex()}", nbytes)
        except OSError:
            return None
        self._busy[segment.id] = segment
        opening = self._opening[segment.id] = node.loop.create_future()
        self._link.send(Share(0, segment.id, os.getpid(), segment.fd, segment.name, nbytes))
        if await opening:
            return segment
        self.possible = False
        if self._busy.pop(segment.id, None) is not None:
            segment.close()
        return None

    def opened(self, id: int, ok: bool) -> None:
        """The peer's word on a new segment."""
        opening = self._opening.pop(id, None)
        if opening is not None and not opening.done():
            opening.set_result(ok)

    def back(self, id: int) -> None:
        """Nobody reads there any more."""
        segment = self._busy.pop(id, None)
        if segment is not None and self._idle is not None:
            self._idle.give(segment)

    def close(self) -> None:
        self.possible = False
        for segment in self._busy.values():
            segment.close()
        self._busy.clear()
        if self._idle is not None:
            self._idle.close()

    def _forget(self, segment: Segment) -> None:
        self._link.send(Unshare(0, segment.id))
