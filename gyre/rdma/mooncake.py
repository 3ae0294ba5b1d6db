"""Mooncake's transfer engine: RDMA, or TCP, peer to peer without a metadata server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from gyre.rdma.base import RegionError, Unusable
from gyre.rdma.copying import steps
from gyre.rdma.exchange import Transfer
from gyre.rdma.frames import Begin
from gyre.rdma.lane import Lane
from gyre.rdma.memory import Registered
from gyre.rdma.pinning import Pinning, outlived

THREADS = 4


class _Grant(msgspec.Struct, array_like=True):
    """The holder's engine, and where the region lies in its process."""

    engine: str
    pointer: int


class MooncakeBackend(Pinning):
    """`where`: an IPv4 address of this machine. `protocol`: "tcp", or "rdma" over the network cards that
    `devices` names ("" for all). Its calls wait for the transfer, so they are made in threads; one that is
    given up goes on until Mooncake's own time-out, and as long both sides keep the memory registered."""

    name = "mooncake"

    def __init__(self, where: str, token: bytes, protocol: str = "tcp", devices: str = "") -> None:
        """Raises Unusable."""
        super().__init__(where, token)
        self._protocol = protocol
        self._devices = devices
        self._engine: Any = load()()
        self._name = ""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="gyre-rdma-mooncake")

    async def start(self) -> None:
        await super().start()
        initialize = self._engine.initialize
        status = await self._call(initialize, self._where, "P2PHANDSHAKE", self._protocol, self._devices)
        if status != 0:
            await self.close()
            raise OSError(f"mooncake does not start with {self._protocol} at {self._where}: status {status}")
        self._name = f"{self._where}:{self._engine.get_rpc_port()}"

    async def close(self) -> None:
        await super().close()
        if self._engine is not None:
            # It takes a second to end.
            await asyncio.get_running_loop().run_in_executor(self._threads, self._drop)
            self._threads.shutdown()

    def _drop(self) -> None:
        self._engine = None

    async def _attach(self, region: Registered) -> None:
        status = await self._call(self._engine.register_memory, region.pointer, region.handle.nbytes)
        if status != 0:
            raise RegionError(region.handle.name, f"mooncake does not register it: status {status}")

    async def _detach(self, region: Registered) -> None:
        await self._call(self._engine.unregister_memory, region.pointer)

    def _call(self, function: Callable[..., int], *arguments: object) -> asyncio.Future[int]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _grant(self, region: Registered, begin: Begin) -> bytes:
        return msgspec.msgpack.encode(_Grant(self._name, region.pointer))

    async def _copy(self, lane: Lane, transfer: Transfer) -> None:
        there = transfer.granted(_Grant)
        engine, local = self._engine, transfer.local
        call = engine.batch_transfer_sync_read if transfer.op == "read" else engine.batch_transfer_sync_write
        for step in steps(transfer.extents):
            here = [local.pointer + extent.local for extent in step]
            far = [there.pointer + extent.remote for extent in step]
            sizes = [extent.nbytes for extent in step]
            status = await outlived(lane, local, self._call(call, there.engine, here, far, sizes))
            if status != 0:
                raise OSError(f"mooncake: status {status}")


def load() -> Any:
    """The class of its engine. Raises Unusable."""
    # Without it every refused transfer is told of on stderr too.
    os.environ.setdefault("GLOG_minloglevel", "3")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    # It never closes those to peers that are gone.
    os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "0")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        lacking = str(error).partition(":")[0]
        fix = (
            f"apt-get install {'libibverbs1' if 'ibverbs' in lacking else lacking}"
            if ".so" in lacking
            else "pip install mooncake-transfer-engine (with CUDA) or mooncake-transfer-engine-non-cuda"
        )
        raise Unusable("mooncake", f"it cannot be imported: {error}", fix) from error
    return TransferEngine
