"""NIXL, with its UCX backend: RDMA, shared memory or TCP, whichever there is between two processes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from gyre.rdma.base import Extent, RegionError, Unusable
from gyre.rdma.copying import steps
from gyre.rdma.exchange import Transfer
from gyre.rdma.frames import Begin
from gyre.rdma.lane import Lane
from gyre.rdma.memory import Registered
from gyre.rdma.nixl_agent import Agent
from gyre.rdma.pinning import Pinning, outlived


class _Grant(msgspec.Struct, array_like=True):
    """Where the region lies in its holder's process, and NIXL's description of both."""

    pointer: int
    metadata: bytes


class _Known:
    """A peer's agent."""

    def __init__(self, name: str, metadata: bytes) -> None:
        self.name = name
        self.metadata = metadata
        self.users = 0


class NixlBackend(Pinning):
    """`where`: an address of this machine. Its thread sleeps while nothing is moved, and takes a core while
    something is: NIXL tells of no completion, and its own thread would never sleep."""

    name = "nixl"

    def __init__(self, where: str, token: bytes) -> None:
        """Raises Unusable."""
        super().__init__(where, token)
        self._api = load()
        self._agent: Agent | None = None
        self._known: dict[str, _Known] = {}
        self._registered: dict[str, Any] = {}
        self._metadata = b""

    async def start(self) -> None:
        await super().start()
        agent = self._agent = Agent(self._make)
        try:
            await agent.ready
        except Exception as error:
            await self.close()
            raise OSError(f"NIXL does not start: {error}") from error

    def _make(self) -> Any:
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        return self._api.nixl_agent(f"gyre-{uuid4().hex}", config)

    async def close(self) -> None:
        await super().close()
        if self._agent is not None:
            agent, self._agent = self._agent, None
            self._known.clear()
            await agent.stop()

    # --- what is registered -----------------------------------------------------------------------

    async def _attach(self, region: Registered) -> None:
        place = [(region.pointer, region.handle.nbytes, 0, "")]

        def register(agent: Any) -> tuple[Any, bytes]:
            return agent.register_memory(place, "DRAM"), agent.get_agent_metadata()

        try:
            self._registered[region.handle.name], self._metadata = await self._running.call(register)
        except Exception as error:
            raise RegionError(region.handle.name, f"NIXL does not register it: {error}") from error

    async def _detach(self, region: Registered) -> None:
        made = self._registered.pop(region.handle.name)

        def deregister(agent: Any) -> bytes:
            agent.deregister_memory(made)
            return bytes(agent.get_agent_metadata())

        self._metadata = await self._running.call(deregister)

    def _grant(self, region: Registered, begin: Begin) -> bytes:
        return msgspec.msgpack.encode(_Grant(region.pointer, self._metadata))

    async def _serve(self, lane: Lane, begin: Begin, region: Registered) -> None:
        agent = self._running
        agent.visit(1)
        try:
            await super()._serve(lane, begin, region)
        finally:
            agent.visit(-1)

    @property
    def _running(self) -> Agent:
        assert self._agent is not None
        return self._agent

    # --- moving -----------------------------------------------------------------------------------

    async def _copy(self, lane: Lane, transfer: Transfer) -> None:
        there = transfer.granted(_Grant)
        known = await self._meet(transfer.remote.peer, there.metadata)
        known.users += 1
        try:
            for step in steps(transfer.extents):
                await self._step(lane, transfer, there.pointer, step, known.name)
        finally:
            known.users -= 1

    async def _step(
        self, lane: Lane, transfer: Transfer, pointer: int, step: Sequence[Extent], name: str
    ) -> None:
        here = [(transfer.local.pointer + extent.local, extent.nbytes, 0) for extent in step]
        far = [(pointer + extent.remote, extent.nbytes, 0) for extent in step]

        def begin(agent: Any) -> Any:
            descriptions = (agent.get_xfer_descs(some, "DRAM") for some in (here, far))
            return agent.initialize_xfer(transfer.op.upper(), *descriptions, name)

        work = self._running.move(begin)
        try:
            await outlived(lane, transfer.local, work)
        except asyncio.CancelledError:
            self._running.give_up(work)
            raise

    async def _meet(self, peer: str, metadata: bytes) -> _Known:
        """Has the agent know the peer's regions. Raises OSError."""
        known = self._known.get(peer)
        if known is not None and known.metadata != metadata and not known.users:
            # It would find those that are gone, and not what lies there now.
            self._part(peer)
            known = None
        if known is None or known.metadata != metadata:
            try:
                name = await self._running.call(lambda agent: agent.add_remote_agent(metadata))
            except Exception as error:
                raise OSError(f"NIXL does not know the peer: {error}") from error
            text = name.decode() if isinstance(name, bytes) else str(name)
            known = self._known.get(peer)
            if known is None or known.name != text:
                known = self._known[peer] = _Known(text, metadata)
            known.metadata = metadata
        return known

    def _lost(self, peer: str) -> None:
        super()._lost(peer)
        self._part(peer)

    def _part(self, peer: str) -> None:
        known = self._known.pop(peer, None)
        if known is not None and self._agent is not None:
            self._agent.call(lambda agent: agent.remove_remote_agent(known.name)).add_done_callback(_heard)


def _heard(done: asyncio.Future[None]) -> None:
    """One that was lost may be unknown already."""
    if not done.cancelled():
        done.exception()


def load() -> Any:
    """Its Python interface. Raises Unusable."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    if not os.path.isdir("/sys/class/infiniband"):
        # Where libibverbs is installed it would be loaded, and with it another libnl than that of NIXL's
        # wheel: the process crashes as it exits.
        os.environ.setdefault("UCX_MODULES", "^ib")
    try:
        from nixl_cu13 import _api
    except ImportError as error:
        raise Unusable("nixl", f"it cannot be imported: {error}", "pip install 'gyre[nixl]'") from error
    logging.getLogger("nixl").setLevel(logging.ERROR)
    return _api
