"""Backends whose bytes do not go by the lane: it admits, keeps memory in place, and tells of death."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from gyre.rdma.exchange import Exchange, Transfer
from gyre.rdma.frames import Begin, Done, Go
from gyre.rdma.lane import Lane, LaneLost
from gyre.rdma.memory import Registered
from gyre.rdma.stages import expect

T = TypeVar("T")


class Pinning(Exchange):
    """As long as a lane is at it, the holder keeps the memory registered; the end of the lane lets go. What
    was moved counts when the holder, asked after it, still had the memory."""

    @abc.abstractmethod
    async def _copy(self, lane: Lane, transfer: Transfer) -> None:
        """Moves the bytes. Raises OSError, LaneLost. Cancelled, it returns when it no longer touches memory,
        or has the lane and the local memory kept until then."""

    @abc.abstractmethod
    def _grant(self, region: Registered, begin: Begin) -> bytes:
        """What a peer needs to reach the memory. Raises OSError where it cannot."""

    async def _move(self, lane: Lane, transfer: Transfer) -> None:
        await while_alive(lane, self._copy(lane, transfer))
        await lane.send(Done())
        expect(await lane.receive(), Done)

    async def _serve(self, lane: Lane, begin: Begin, region: Registered) -> None:
        await lane.send(Go(self._grant(region, begin)))
        # No time-out: a peer that has given up may still be at the memory; its death ends the lane.
        expect(await lane.receive(), Done)
        await lane.send(Done())


async def outlived(lane: Lane, local: Registered, work: asyncio.Future[T]) -> T:
    """What it brings. Where this is cancelled the work goes on; until it is over the memory on both sides
    stays where it is."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if not work.done():
            lane.keep()
            local.keep()
            work.add_done_callback(lambda _: lane.let_go())
            work.add_done_callback(lambda _: local.let_go())
        raise
    finally:
        work.add_done_callback(lambda done: done.cancelled() or done.exception())


async def while_alive(lane: Lane, work: Coroutine[Any, Any, None]) -> None:
    """Does it, and cancels it where the lane ends before the other end has said anything. Raises LaneLost
    then, else what it raises."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    ended = loop.create_task(lane.ended())
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not ended.result():
            await asyncio.wait({task})
    finally:
        done = task.done()
        task.cancel()
        ended.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)
    if not done:
        raise LaneLost("it closed the connection")
    await task
