"""UCX, by ucxx: RDMA, shared memory or TCP between two processes. Both ends take part in each transfer."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from gyre.actors.transport import TransportUnusable
from gyre.actors.transport.ucx_worker import UcxWorker
from gyre.rdma.base import Unusable
from gyre.rdma.exchange import Exchange, Transfer
from gyre.rdma.frames import BadFrame, Begin, Done, Go
from gyre.rdma.lane import Lane
from gyre.rdma.memory import Registered
from gyre.rdma.pinning import while_alive
from gyre.rdma.stages import expect

# Under way at once, of one operation.
WINDOW = 32
# Larger ones are moved in parts.
PART_BYTES = 32 * 2**20
# How long UCX may take to let go of memory after an end.
END_TIMEOUT_S = 1.0


class _Grant(msgspec.Struct, array_like=True):
    """The holder's worker, and the tag of the bytes to come."""

    worker: bytes
    tag: int


class _End:
    """This end of a lane: a worker of its own, so that its end, whenever it comes, is that of whatever UCX
    has under way. Endpoints of one pair of workers get mixed up where some are closed and others made."""

    def __init__(self, devices: str) -> None:
        """Raises TransportUnusable."""
        from ucxx._lib.arr import Array

        self._array = Array
        self._worker = UcxWorker(devices, tags=True)
        self.address = self._worker.address()
        self._endpoint: Any = None
        self._requests: deque[tuple[Any, memoryview]] = deque()
        self._changed: asyncio.Event = asyncio.Event()
        self._why = ""
        self._over = False
        self._worker.add(self)

    def meet(self, address: bytes) -> None:
        """The worker at the other end; once. Raises BadFrame."""
        if self._endpoint is None:
            try:
                self._endpoint = self._worker.reach(address)
            except (self._worker.api.UCXError, ValueError, TypeError) as error:
                raise BadFrame(f"no address of a worker: {error}") from error

    async def send(self, views: Iterable[memoryview], tag: int) -> None:
        """Raises OSError."""
        await self._all(views, lambda view: self._endpoint.tag_send(self._array(view), self._tag(tag)))

    async def receive(self, views: Iterable[memoryview], tag: int) -> None:
        """Raises OSError."""
        await self._all(views, lambda view: self._endpoint.tag_recv(self._array(view), self._tag(tag)))

    async def end(self) -> None:
        """Then UCX has no memory of ours any more."""
        await self._worker.close()

    def _tag(self, tag: int) -> Any:
        return self._worker.api.UCXXTag(tag)

    async def _all(self, views: Iterable[memoryview], begin: Callable[[memoryview], Any]) -> None:
        for view in views:
            for at in range(0, len(view), PART_BYTES):
                await self._until(WINDOW - 1)
                part = view[at : at + PART_BYTES]
                self._requests.append((begin(part), part))
                self._worker.soon()
        await self._until(0)

    async def _until(self, under_way: int) -> None:
        self.poll()
        while not self._why and len(self._requests) > under_way:
            await self._changed.wait()
        if self._why:
            raise OSError(f"UCX: {self._why}")

    # --- for the worker ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Nothing waits here to be sent."""

    def poll(self) -> None:
        before = len(self._requests)
        while self._requests and self._requests[0][0].completed:
            request, _ = self._requests.popleft()
            if request.status != 0:
                self._why = self._why or f"status {request.status}"
        if self._endpoint is not None and not self._endpoint.alive:
            self._why = self._why or "the other end is gone"
        if self._why or len(self._requests) != before:
            self._changed.set()
            self._changed = asyncio.Event()
        if self._over and not self._requests:
            self._worker.forget(self)

    def close(self) -> None:
        """What is still under way after a while ends with the worker."""
        self._over = True
        self._why = self._why or "it was closed"
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            self._worker.part(endpoint, idle=not self._requests)
        self._worker.soon()
        asyncio.get_running_loop().call_later(END_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if self._requests:
            self._requests.clear()
            self._worker.forget(self)


class UcxBackend(Exchange):
    """`where`: an address of this machine. What UCX uses is set by its own variables: UCX_TLS,
    UCX_NET_DEVICES. It has no thread, and is not polled."""

    name = "ucx"

    def __init__(self, where: str, token: bytes) -> None:
        """Raises Unusable."""
        super().__init__(where, token)
        # Left the choice among several networks, the two ends may disagree: see the transport.
        self._devices = "lo" if where.startswith("127.") else ""
        self._ends: dict[Lane, _End] = {}
        self._ending_them: set[asyncio.Task[None]] = set()
        try:
            UcxWorker(self._devices, tags=True)
        except TransportUnusable as error:
            raise Unusable("ucx", error.why, error.fix) from error

    async def _ending(self) -> None:
        await asyncio.gather(*self._ending_them)
        await super()._ending()

    def _end(self, lane: Lane) -> _End:
        if lane not in self._ends:
            self._ends[lane] = _End(self._devices)
            lane.at_close.append(lambda: self._part(lane))
        return self._ends[lane]

    def _part(self, lane: Lane) -> None:
        ending = asyncio.get_running_loop().create_task(self._ends.pop(lane).end(), name="end of a lane")
        self._ending_them.add(ending)
        ending.add_done_callback(self._ending_them.discard)

    async def _moved(self, lane: Lane, moving: Coroutine[Any, Any, None]) -> None:
        """Where it fails, until UCX is no longer at the memory."""
        try:
            await while_alive(lane, moving)
        except BaseException:
            # The other end hears of it, and lets go too.
            lane.close()
            if self._ending_them:
                await asyncio.wait([*self._ending_them])
            raise

    async def _attach(self, region: Registered) -> None:
        """UCX registers what it moves, and remembers it."""

    async def _detach(self, region: Registered) -> None:
        pass

    def _hint(self, lane: Lane) -> bytes:
        return self._end(lane).address

    async def _move(self, lane: Lane, transfer: Transfer) -> None:
        there = transfer.granted(_Grant)
        end = self._end(lane)
        end.meet(there.worker)
        views = [transfer.local.view(extent.local, extent.nbytes) for extent in transfer.extents]
        moving = end.receive(views, there.tag) if transfer.op == "read" else end.send(views, there.tag)
        await self._moved(lane, moving)
        expect(await lane.receive(), Done)

    async def _serve(self, lane: Lane, begin: Begin, region: Registered) -> None:
        end = self._end(lane)
        end.meet(begin.hint)
        tag = int.from_bytes(os.urandom(8), "big")
        views = [region.view(offset, nbytes) for offset, nbytes in begin.pieces]
        await lane.send(Go(msgspec.msgpack.encode(_Grant(end.address, tag))))
        moving = end.send(views, tag) if begin.op == "read" else end.receive(views, tag)
        await self._moved(lane, moving)
        await lane.send(Done())
