"""UCX, by ucxx: RDMA, shared memory or TCP between two processes. Both ends take part in each transfer."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from gyre.actors.transport import TransportUnusable
from gyre.actors.transport.ucx_worker import UcxWorker
from gyre.rdma.base import Extent, Op, RegionHandle, Unusable
from gyre.rdma.exchange import Exchange
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
END_TIMEOUT_S = 10.0


class _Grant(msgspec.Struct, array_like=True):
    """The holder's worker, and the tag of the bytes to come."""

    worker: bytes
    tag: int


class _End:
    """An endpoint to the worker at the other end of a lane, and what is under way on it."""

    def __init__(self, lane: Lane, worker: UcxWorker, address: bytes) -> None:
        from ucxx._lib.arr import Array

        self._lane = lane
        self._array = Array
        self._worker = worker
        self._endpoint: Any = worker.reach(address)
        self._requests: deque[tuple[Any, memoryview]] = deque()
        self._changed: asyncio.Event = asyncio.Event()
        self._why = ""
        worker.add(self)

    async def send(self, views: Iterable[memoryview], tag: int) -> None:
        """Raises OSError."""
        await self._all(views, lambda view: self._endpoint.tag_send(self._array(view), self._tag(tag)))

    async def receive(self, views: Iterable[memoryview], tag: int) -> None:
        """Raises OSError."""
        await self._all(views, lambda view: self._endpoint.tag_recv(self._array(view), self._tag(tag)))

    def _tag(self, tag: int) -> Any:
        return self._worker.api.UCXXTag(tag)

    async def _all(self, views: Iterable[memoryview], begin: Callable[[memoryview], Any]) -> None:
        try:
            for view in views:
                for at in range(0, len(view), PART_BYTES):
                    await self._until(WINDOW - 1)
                    part = view[at : at + PART_BYTES]
                    self._requests.append((begin(part), part))
                    self._worker.soon()
            await self._until(0)
        except BaseException:
            # The other end hears of it, and lets go too: until then UCX may not.
            self._lane.close()
            await self._let_go()
            raise

    async def _until(self, under_way: int) -> None:
        self.poll()
        while not self._why and len(self._requests) > under_way:
            await self._changed.wait()
        if self._why:
            raise OSError(f"UCX: {self._why}")

    async def _let_go(self) -> None:
        """Until UCX has no memory of ours any more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                while self._requests:
                    await self._changed.wait()

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
        if self._endpoint is None and not self._requests:
            self._worker.forget(self)

    def close(self) -> None:
        """Ends it; once."""
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            self._why = self._why or "it was closed"
            self._worker.part(endpoint, idle=not self._requests)
            self._worker.soon()


class UcxBackend(Exchange):
    """`where`: an address of this machine. What UCX uses is set by its own variables: UCX_TLS,
    UCX_NET_DEVICES. It has no thread, and is not polled."""

    name = "ucx"

    def __init__(self, where: str, token: bytes) -> None:
        """Raises Unusable."""
        super().__init__(where, token)
        try:
            self._worker: UcxWorker | None = UcxWorker("lo" if where.startswith("127.") else "", tags=True)
        except TransportUnusable as error:
            raise Unusable("ucx", error.why, error.fix) from error
        self._me_there = b""
        self._ends: dict[Lane, _End] = {}

    async def start(self) -> None:
        await super().start()
        self._me_there = self._running.address()

    async def close(self) -> None:
        await super().close()
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await worker.close()

    @property
    def _running(self) -> UcxWorker:
        assert self._worker is not None
        return self._worker

    async def _attach(self, region: Registered) -> None:
        """UCX registers what it moves, and remembers it."""

    async def _detach(self, region: Registered) -> None:
        pass

    def _hint(self) -> bytes:
        return self._me_there

    def _end(self, lane: Lane, address: bytes) -> _End:
        """Raises BadFrame."""
        if lane not in self._ends:
            try:
                self._ends[lane] = _End(lane, self._running, address)
            except (self._running.api.UCXError, ValueError, TypeError) as error:
                raise BadFrame(f"no address of a worker: {error}") from error
            lane.at_close.append(lambda: self._ends.pop(lane).close())
        return self._ends[lane]

    async def _move(
        self,
        lane: Lane,
        op: Op,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        grant: bytes,
    ) -> None:
        try:
            there = msgspec.msgpack.decode(grant, type=_Grant)
        except msgspec.MsgspecError as error:
            raise BadFrame(f"not a grant: {error}") from error
        end = self._end(lane, there.worker)
        views = [local.view(extent.local, extent.nbytes) for extent in extents]
        moving = end.receive(views, there.tag) if op == "read" else end.send(views, there.tag)
        await while_alive(lane, moving)
        expect(await lane.receive(), Done)

    async def _serve(self, lane: Lane, begin: Begin, region: Registered) -> None:
        end = self._end(lane, begin.hint)
        tag = int.from_bytes(os.urandom(8), "big")
        views = [region.view(offset, nbytes) for offset, nbytes in begin.pieces]
        await lane.send(Go(msgspec.msgpack.encode(_Grant(self._me_there, tag))))
        moving = end.send(views, tag) if begin.op == "read" else end.receive(views, tag)
        await while_alive(lane, moving)
        await lane.send(Done())
