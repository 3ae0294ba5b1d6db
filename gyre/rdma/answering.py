"""The holder's side: who calls proves itself, asks for a region, and is served or refused."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import structlog

from gyre.actors.handshake import Peer
from gyre.rdma.base import Note
from gyre.rdma.dialling import answer, listening
from gyre.rdma.frames import BadFrame, Begin, Done, Frame, Hold, No, Tell
from gyre.rdma.lane import Lane
from gyre.rdma.memory import Registered
from gyre.rdma.notes import Notes
from gyre.rdma.stages import Rejected

HANDSHAKE_TIMEOUT_S = 10.0
ACCEPT_AGAIN_S = 0.1

log = structlog.get_logger()

Serve = Callable[[Lane, Begin, Registered], Awaitable[None]]


class Answering:
    """Listens at `where`, for those who hold the token. `serve` does what was admitted, `readers` has the
    lanes of those who keep something mapped."""

    def __init__(
        self,
        name: str,
        where: str,
        token: bytes,
        regions: Mapping[str, Registered],
        serve: Serve,
        readers: Callable[[Lane], Awaitable[None]],
    ) -> None:
        """Raises OSError."""
        self._readers = readers
        self._token = token
        self._regions = regions
        self._serve = serve
        self._log = log.bind(backend=name)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = listening(where)
        if where.startswith("/"):
            self.address = f"unix:{where}"
        else:
            host = f"[{where}]" if ":" in where else where
            self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.me = Peer("", name, self.address)
        self.notes = Notes()
        self._begin(self._accept(self._listener))

    async def close(self) -> None:
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        if self.address.startswith("unix:"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix:"))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"rdma {self.address}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # No file descriptor is free; the caller waits in the listener.
                self._log.warning("rdma_accept_failed", why=str(error))
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            self._begin(self._answer(Lane(sock)))

    async def _answer(self, lane: Lane) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await answer(lane, self._token, self.me)
            while True:
                await self._handle(lane, await lane.receive())
        except BadFrame as error:
            self._log.warning("rdma_bad_frame", peer=lane.peer, why=str(error))
        except (Rejected, OSError):
            pass  # who asked has given up, or is gone
        finally:
            lane.close()

    async def _handle(self, lane: Lane, frame: Frame) -> None:
        if isinstance(frame, Tell):
            await self.notes.put(Note(lane.peer, frame.message))
            await lane.send(Done())
        elif isinstance(frame, Begin):
            region = self._regions.get(frame.name)
            if region is None or (why := refusal(frame, region)) is not None:
                await lane.send(No("no such region" if region is None else str(why)))
                return
            with region.used(lane.close):
                await self._serve(lane, frame, region)
        elif isinstance(frame, Hold):
            await self._readers(lane)
        else:
            raise BadFrame(f"a {type(frame).__name__} where a request belongs")


def refusal(begin: Begin, region: Registered) -> str | None:
    """Why not, or None."""
    if not hmac.compare_digest(begin.key, region.handle.key):
        return "wrong key: it was registered anew, or the handle is not its holder's"
    if not region.open:
        return "it is not open"
    if begin.nbytes != region.handle.nbytes:
        return f"has {region.handle.nbytes} bytes, not {begin.nbytes}"
    if begin.op == "write" and not region.writable:
        return "is read-only"
    return None
