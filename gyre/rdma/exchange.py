"""What all backends share: they listen, admit, ask to be admitted, tell, and close."""

from __future__ import annotations

import abc
import asyncio
import hashlib
import hmac
import socket
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import structlog

from gyre.actors.handshake import Peer
from gyre.rdma.base import (
    DEFAULT_TIMEOUT_S,
    Extent,
    Note,
    Op,
    PeerLost,
    Refused,
    RegionError,
    RegionHandle,
    Stage,
    TransferError,
    TransferTimeout,
)
from gyre.rdma.dialling import Lanes, answer, listening
from gyre.rdma.frames import (
    MAX_NOTE_BYTES,
    MAX_PIECES,
    MAX_TIMEOUT_S,
    BadFrame,
    Begin,
    Done,
    Frame,
    Go,
    No,
    Tell,
)
from gyre.rdma.lane import Lane, LaneLost
from gyre.rdma.memory import (
    Registered,
    bytes_of,
    check_extents,
    checked_name,
    fresh_bytes,
    new_key,
    stripes,
)

HANDSHAKE_TIMEOUT_S = 10.0
# Told, and not taken from `notes` yet; more of them wait at their senders.
NOTES = 1024
# Of one operation; fewer do not pay for another connection.
STRIPE_BYTES = 16 * 2**20

log = structlog.get_logger()


class At:
    """How far an operation has come."""

    stage: Stage = "dial"


class Exchange(abc.ABC):
    """A backend without its way to move bytes. Peers must hold `token`; `where` is an address of this machine
    by which they reach it, or the path of a socket."""

    name: str
    # Connections that one operation may use at once.
    stripes = 1

    def __init__(self, where: str, token: bytes) -> None:
        self._where = where
        # Nobody who may talk to an actor with the token gets by it into a lane, nor the other way.
        self._token = hmac.digest(token, b"gyre-rdma-1", hashlib.sha256)
        self._regions: dict[str, Registered] = {}
        self._notes: deque[Note] = deque()
        self._changed: asyncio.Event = asyncio.Event()
        self._listener: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._lanes: Lanes | None = None
        self._address = ""
        # Memory is made there: it takes the kernel a while to find it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"gyre-rdma-{self.name}")
        self.closed = False

    # --- what differs -----------------------------------------------------------------------------

    @abc.abstractmethod
    async def _move(
        self,
        lane: Lane,
        op: Op,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        grant: bytes,
    ) -> None:
        """Moves what was admitted. Raises LaneLost, BadFrame, or OSError where the way itself fails."""

    @abc.abstractmethod
    async def _serve(self, lane: Lane, begin: Begin, region: Registered) -> None:
        """The holder's side of that, from its `Go` on."""

    @abc.abstractmethod
    async def _attach(self, region: Registered) -> None:
        """Makes the memory reachable. Raises RegionError, then it is not."""

    @abc.abstractmethod
    async def _detach(self, region: Registered) -> None:
        """Undoes that."""

    # --- the contract -----------------------------------------------------------------------------

    @property
    def address(self) -> str:
        if not self._address:
            raise RuntimeError(f"the backend {self.name} was not started")
        return self._address

    async def start(self) -> None:
        self._listener = listening(self._where)
        if self._where.startswith("/"):
            self._address = f"unix:{self._where}"
        else:
            host = f"[{self._where}]" if ":" in self._where else self._where
            self._address = f"{host}:{self._listener.getsockname()[1]}"
        self._me = Peer("", self.name, self._address)
        self._lanes = Lanes(self._token, self._me)
        self._begin(self._accept(self._listener), "accept")

    async def allocate(self, name: str, nbytes: int, *, writable: bool = False) -> Registered:
        self._check_new(name)
        loop = asyncio.get_running_loop()
        return await self._enter(
            name, await loop.run_in_executor(self._thread, fresh_bytes, name, nbytes), writable
        )

    async def register(self, name: str, memory: object, *, writable: bool = False) -> Registered:
        self._check_new(name)
        return await self._enter(name, bytes_of(name, memory, writable=writable), writable)

    async def _enter(self, name: str, buffer: memoryview, writable: bool) -> Registered:
        self._check_new(name)
        key = new_key()
        handle = RegionHandle(backend=self.name, name=name, nbytes=buffer.nbytes, peer=self._address, key=key)
        region = self._regions[name] = Registered(handle, buffer, writable, self._leave)
        attaching = asyncio.get_running_loop().create_task(self._attach(region), name=f"register {name}")
        try:
            await asyncio.shield(attaching)
        except asyncio.CancelledError:
            # What has been begun there cannot be stopped: it is undone.
            await asyncio.wait({attaching})
            if attaching.exception() is None:
                await region.close()
            raise
        finally:
            if not attaching.done() or attaching.exception() is not None:
                self._regions.pop(name, None)
        region.open = True
        return region

    async def _leave(self, region: Registered) -> None:
        await self._detach(region)
        del self._regions[region.handle.name]

    def _check_new(self, name: str) -> None:
        if checked_name(name) in self._regions:
            raise RegionError(name, "is registered already")
        if self.closed or not self._address:
            raise RegionError(name, f"the backend {self.name} is not running")

    async def read(
        self,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        await self._operate("read", local, remote, extents, timeout_s)

    async def write(
        self,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        await self._operate("write", local, remote, extents, timeout_s)

    async def notify(self, peer: str, message: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if len(message) > MAX_NOTE_BYTES:
            raise ValueError(f"a notification of {len(message)} bytes; at most {MAX_NOTE_BYTES} are allowed")
        at = At()
        with self._told("", peer, at, timeout_s):
            async with asyncio.timeout(timeout_s), self._open_lanes.lane(peer) as lane:
                at.stage = "notify"
                await lane.send(Tell(message))
                expect(await lane.receive(), Done)

    async def notes(self) -> AsyncIterator[Note]:
        while not self.closed:
            while self._notes:
                yield self._notes.popleft()
                self._change()
            if not self.closed:
                await self._changed.wait()

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._change()
        for region in [*self._regions.values()]:
            await region.close()
        for task in [*self._serving]:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self._lanes is not None:
            self._lanes.close()
        self._thread.shutdown()

    # --- asking -----------------------------------------------------------------------------------

    async def _operate(
        self,
        op: Op,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        timeout_s: float,
    ) -> None:
        """As many requests as its connections can work at, or as it has too many pieces for one."""
        if remote.backend != self.name:
            raise RegionError(remote.name, f"is on backend {remote.backend!r}, not {self.name!r}")
        if not 0 < timeout_s < MAX_TIMEOUT_S:
            raise ValueError(f"a time-out of {timeout_s} s")
        joined = check_extents(op, local.handle, remote, extents)
        parts = stripes(joined, self.stripes, STRIPE_BYTES, MAX_PIECES)
        if len(parts) == 1:
            await self._request(op, local, remote, parts[0], timeout_s)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(self._request(op, local, remote, part, timeout_s))
        except* RegionError as errors:
            raise errors.exceptions[0] from None

    async def _request(
        self, op: Op, local: Registered, remote: RegionHandle, extents: Sequence[Extent], timeout_s: float
    ) -> None:
        begin = Begin(
            op,
            remote.name,
            remote.key,
            remote.nbytes,
            [(extent.remote, extent.nbytes) for extent in extents],
            timeout_s,
            self._hint(),
        )
        at = At()
        with local.used(), self._told(remote.name, remote.peer, at, timeout_s):
            async with asyncio.timeout(timeout_s), self._open_lanes.lane(remote.peer) as lane:
                at.stage = "admit"
                await lane.send(begin)
                go = expect(await lane.receive(), Go)
                assert isinstance(go, Go)
                at.stage = "move"
                await self._move(lane, op, local, remote, extents, go.grant)

    def _lost(self, peer: str) -> None:
        """It cannot be reached any more, or does not speak as it should."""
        log.info("rdma_peer_lost", backend=self.name, peer=peer)

    def _hint(self) -> bytes:
        """What the holder needs to know of this end."""
        return b""

    @property
    def _open_lanes(self) -> Lanes:
        if self._lanes is None or self.closed:
            raise LaneLost(f"the backend {self.name} is not running")
        return self._lanes

    @contextmanager
    def _told(self, name: str, peer: str, at: At, timeout_s: float) -> Iterator[None]:
        """Errors as those of the contract."""
        try:
            yield
        except TimeoutError as error:
            raise TransferTimeout(name, peer, at.stage, f"not done within {timeout_s:g} s") from error
        except Rejected as error:
            raise Refused(name, peer, at.stage, str(error)) from error
        except (LaneLost, BadFrame) as error:
            self._lost(peer)
            raise PeerLost(name, peer, at.stage, str(error)) from error
        except (OSError, ValueError) as error:
            raise TransferError(name, peer, at.stage, str(error)) from error

    # --- answering --------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"rdma {self.name}: {name}")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("rdma_accept_failed", backend=self.name, why=str(error))
                await asyncio.sleep(0.1)  # no file descriptor is free; the caller waits in the listener
                continue
            self._begin(self._answer(Lane(sock)), "serve")

    async def _answer(self, lane: Lane) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await answer(lane, self._token, self._me)
            while True:
                await self._handle(lane, await lane.receive())
        except (LaneLost, TimeoutError):
            pass
        except BadFrame as error:
            log.warning("rdma_bad_frame", backend=self.name, peer=lane.peer, why=str(error))
        finally:
            lane.close()

    async def _handle(self, lane: Lane, frame: Frame) -> None:
        if isinstance(frame, Tell):
            await self._take(Note(lane.peer, frame.message))
            await lane.send(Done())
        elif isinstance(frame, Begin):
            region = self._regions.get(frame.name)
            if region is None or (why := refusal(frame, region)) is not None:
                await lane.send(No("no such region" if region is None else str(why)))
                return
            with region.used(lane.close):
                await self._serve(lane, frame, region)
        else:
            raise BadFrame(f"a {type(frame).__name__} where a request belongs")

    async def _take(self, note: Note) -> None:
        while len(self._notes) >= NOTES and not self.closed:
            await self._changed.wait()
        self._notes.append(note)
        self._change()

    def _change(self) -> None:
        """Wakes whoever waits for notes, or for room for one."""
        self._changed.set()
        self._changed = asyncio.Event()


class Rejected(Exception):
    """The other end said no."""


def expect(frame: Frame, kind: type[Frame]) -> Frame:
    """Raises Rejected, BadFrame."""
    if isinstance(frame, No):
        raise Rejected(frame.reason)
    if not isinstance(frame, kind):
        raise BadFrame(f"a {type(frame).__name__} where a {kind.__name__} belongs")
    return frame


def refusal(begin: Begin, region: Registered) -> str | None:
    """Why not, or None."""
    if not hmac.compare_digest(begin.key, region.handle.key):
        return "wrong key: it was registered anew, or the handle is not its holder's"
    if not region.open:
        return "is being closed"
    if begin.nbytes != region.handle.nbytes:
        return f"has {region.handle.nbytes} bytes, not {begin.nbytes}"
    if begin.op == "write" and not region.writable:
        return "is read-only"
    return None
