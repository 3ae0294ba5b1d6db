"""What all backends share: they listen, admit, ask to be admitted, tell, and close."""

from __future__ import annotations

import abc
import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from gyre.rdma.answering import Answering
from gyre.rdma.base import (
    DEFAULT_TIMEOUT_S,
    Extent,
    Look,
    Note,
    Op,
    RegionError,
    RegionHandle,
    Registration,
    TransferTimeout,
)
from gyre.rdma.dialling import Lanes
from gyre.rdma.frames import MAX_NOTE_BYTES, MAX_PIECES, MAX_TIMEOUT_S, BadFrame, Begin, Done, Go, Tell
from gyre.rdma.lane import Lane, LaneLost
from gyre.rdma.looking import Looks
from gyre.rdma.memory import (
    Memory,
    Registered,
    bytes_of,
    check_extents,
    check_pieces,
    checked_name,
    fresh_bytes,
    new_key,
    of_host,
    stripes,
)
from gyre.rdma.stages import At, expect, told

# Of one operation; fewer do not pay for another connection.
STRIPE_BYTES = 16 * 2**20

T = TypeVar("T")
log = structlog.get_logger()


class Transfer(NamedTuple):
    """What was admitted: bytes of `local`, and of `remote`, which is reached by its holder's `grant`."""

    op: Op
    local: Registered
    remote: RegionHandle
    extents: Sequence[Extent]
    grant: bytes

    def granted(self, kind: type[T]) -> T:
        """Raises BadFrame where the grant is none of that kind."""
        try:
            return msgspec.msgpack.decode(self.grant, type=kind)
        except msgspec.MsgspecError as error:
            raise BadFrame(f"not a grant: {error}") from error


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
        self._answering: Answering | None = None
        self._lanes: Lanes | None = None
        # Memory is made there: it takes the kernel a while to find it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"gyre-rdma-{self.name}")
        self._looks = Looks(self._thread)
        self.closed = False

    # --- what differs -----------------------------------------------------------------------------

    @abc.abstractmethod
    async def _move(self, lane: Lane, transfer: Transfer) -> None:
        """Moves what was admitted. Raises LaneLost, BadFrame, or OSError where the way itself fails."""

    @abc.abstractmethod
    async def _serve(self, lane: Lane, begin: Begin, region: Registered) -> None:
        """The holder's side of that, from its `Go` on."""

    async def _keep_reader(self, lane: Lane) -> None:
        """Until the end of a lane of one that keeps memory mapped. Raises LaneLost, BadFrame."""
        raise BadFrame(f"the backend {self.name} has nothing that stays mapped")

    @abc.abstractmethod
    async def _attach(self, region: Registered) -> None:
        """Makes the memory reachable. Raises RegionError, then it is not."""

    @abc.abstractmethod
    async def _detach(self, region: Registered) -> None:
        """Undoes that."""

    # --- the contract -----------------------------------------------------------------------------

    @property
    def address(self) -> str:
        if self._answering is None:
            raise RuntimeError(f"the backend {self.name} was not started")
        return self._answering.address

    async def start(self) -> None:
        here = self._answering = Answering(
            self.name, self._where, self._token, self._regions, self._serve, self._keep_reader
        )
        self._lanes = Lanes(self._token, here.me)

    async def allocate(self, name: str, nbytes: int, *, writable: bool = False) -> Registered:
        self._check_new(name)
        loop = asyncio.get_running_loop()
        fresh = await loop.run_in_executor(self._thread, fresh_bytes, name, nbytes)
        return await self._enter(name, of_host(fresh), writable)

    async def register(self, name: str, memory: object, *, writable: bool = False) -> Registered:
        self._check_new(name)
        return await self._enter(name, of_host(bytes_of(name, memory, writable=writable)), writable)

    async def _enter(self, name: str, memory: Memory, writable: bool) -> Registered:
        self._check_new(name)
        key = new_key()
        handle = RegionHandle(backend=self.name, name=name, nbytes=memory.nbytes, peer=self.address, key=key)
        region = self._regions[name] = Registered(self, handle, memory, writable, self._leave)
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
        if self.closed or self._answering is None:
            raise RegionError(name, f"the backend {self.name} is not running")

    async def read(
        self,
        local: Registration,
        remote: RegionHandle,
        extents: Sequence[Extent],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        look: Look | None = None,
    ) -> None:
        own = self._own(local)
        if look is None:
            await self._operate("read", own, remote, extents, timeout_s)
        else:
            check_pieces(extents, look.nbytes)
            await self._read_and_look(own, remote, extents, timeout_s, look)

    async def write(
        self,
        local: Registration,
        remote: RegionHandle,
        extents: Sequence[Extent],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        await self._operate("write", self._own(local), remote, extents, timeout_s)

    def _own(self, region: Registration) -> Registered:
        if not isinstance(region, Registered) or region.backend is not self:
            raise RegionError(region.handle.name, f"is not registered with this backend {self.name!r}")
        return region

    async def notify(self, peer: str, message: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if len(message) > MAX_NOTE_BYTES:
            raise ValueError(f"a notification of {len(message)} bytes; at most {MAX_NOTE_BYTES} are allowed")
        at = At()
        with told("", peer, at, timeout_s, self._lost):
            async with asyncio.timeout(timeout_s), self._open_lanes.lane(peer) as lane:
                at.stage = "notify"
                await lane.send(Tell(message))
                expect(await lane.receive(), Done)

    async def until_lost(self, peer: str) -> None:
        with told("", peer, At(), 0.0, self._lost):
            await self._open_lanes.until_lost(peer)

    def notes(self) -> AsyncIterator[Note]:
        if self._answering is None:
            raise RuntimeError(f"the backend {self.name} was not started")
        return self._answering.notes.taken()

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._answering is not None:
            self._answering.notes.close()
        for region in [*self._regions.values()]:
            await region.close()
        if self._answering is not None:
            await self._answering.close()
        if self._lanes is not None:
            await self._lanes.close()
        await self._ending()

    async def _ending(self) -> None:
        """Last: nothing is registered or under way any more."""
        self._thread.shutdown()

    # --- asking -----------------------------------------------------------------------------------

    async def _read_and_look(
        self,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        timeout_s: float,
        look: Look,
    ) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        with local.used():
            await self._operate("read", local, remote, extents, timeout_s)
            if not await self._looks.at(extents, look, deadline):
                raise TransferTimeout(remote.name, remote.peer, "look", f"not done within {timeout_s:g} s")

    async def _operate(
        self,
        op: Op,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        timeout_s: float,
    ) -> None:
        """As many requests as its connections can work at, or as it has too many pieces for one."""
        joined = self._checked(op, local, remote, extents, timeout_s)
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

    def _checked(
        self,
        op: Op,
        local: Registered,
        remote: RegionHandle,
        extents: Sequence[Extent],
        timeout_s: float,
    ) -> list[Extent]:
        """Joined where they can be. Raises RegionError."""
        if remote.backend != self.name:
            raise RegionError(remote.name, f"is on backend {remote.backend!r}, not {self.name!r}")
        if not 0 < timeout_s < MAX_TIMEOUT_S:
            raise ValueError(f"a time-out of {timeout_s} s")
        return check_extents(op, local.handle, remote, extents)

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
        )
        at = At()
        with local.used(), told(remote.name, remote.peer, at, timeout_s, self._lost):
            async with asyncio.timeout(timeout_s), self._open_lanes.lane(remote.peer) as lane:
                at.stage = "admit"
                begin.hint = self._hint(lane)
                await lane.send(begin)
                go = expect(await lane.receive(), Go)
                at.stage = "move"
                await self._move(lane, Transfer(op, local, remote, extents, go.grant))

    def _lost(self, peer: str) -> None:
        """It cannot be reached any more, or does not speak as it should."""
        log.info("rdma_peer_lost", backend=self.name, peer=peer)

    def _hint(self, lane: Lane) -> bytes:
        """What the holder needs to know of this end."""
        return b""

    @property
    def _open_lanes(self) -> Lanes:
        if self._lanes is None or self.closed:
            raise LaneLost(f"the backend {self.name} is not running")
        return self._lanes
