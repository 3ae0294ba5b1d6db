"""The server of one engine: found or started, its commands, its end."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path

import structlog
import torch
from yarl import URL

from gyre.cell.config import SglangConfig
from gyre.cell.engine.base import EngineFault
from gyre.cell.engine.sglang_client import SglangClient
from gyre.cell.engine.sglang_device import DeviceMemory, cuda_memory
from gyre.cell.engine.sglang_kv import KvStorage
from gyre.cell.engine.sglang_launch import Served
from gyre.cell.engine.sglang_server import SglangServer
from gyre.cell.engine.sglang_versions import Dialect, check_version
from gyre.cell.engine.sglang_weights import ByDisk, ByGroup, ByIpc, Delivery, Thread
from gyre.cell.engine.sglang_wire import ServerInfo, decode

log = structlog.get_logger()

IDLE_TIMEOUT_S = 30
MEMORY_TIMEOUT_S = 120.0
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
EXPLAIN_S = 2.0


class Link:
    """`open` first. `ended` is called with the reason when a server of our own is gone."""

    def __init__(
        self,
        served: Served,
        config: SglangConfig,
        *,
        server_url: str | None,
        log_path: Path,
        scratch: Path,
        ended: Callable[[EngineFault], None],
    ) -> None:
        self._served = served
        self._config = config
        self._server_url = server_url
        self._log_path = log_path
        self._scratch = scratch
        self._ended = ended
        if served.device == "cuda":
            # Both ends of an NCCL group must share memory in one way, or they hang; SGLang's is this one.
            # The first group of a process reads it.
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        self._server: SglangServer | None = None
        self._kv: KvStorage | None = None
        self._memory = DeviceMemory(None)
        self._device = torch.device("cuda", served.gpu) if served.device == "cuda" else torch.device("cpu")
        self._thread = Thread(self._device)
        self._saver = False
        self._held = 0
        self._released: list[str] = []
        self._stopping = False
        self.client: SglangClient
        self.delivery: Delivery

    @property
    def own(self) -> bool:
        return self._server is not None

    async def open(self) -> ServerInfo:
        """Starts the server, or looks at the one that runs. EngineFault, and nothing is left."""
        if self._server_url is None:
            info = await self._start()
        else:
            url = URL(self._server_url)
            self.client = SglangClient(str(url.with_user(None)), url.password)
            info = decode(await self.client.get("/server_info"), ServerInfo, "/server_info")
            # Whoever had it before may have left it paused.
            await self.client.post("/continue_generation")
        try:
            await self._meet(info)
        except BaseException:
            await self.close()
            raise
        return info

    async def close(self) -> None:
        """Stops a server of our own; leaves another as it is."""
        self._stopping = True
        self._thread.close()
        if self._server is not None:
            await self._server.stop()
        elif hasattr(self, "client"):
            await self.client.close()

    async def explained(self, fault: EngineFault) -> EngineFault:
        """A broken connection to a server that has ended tells too little."""
        if self._server is None:
            return fault
        await asyncio.wait([self._server.ended], timeout=EXPLAIN_S)
        if not self._server.ended.done():
            return fault
        explained = EngineFault(f"{fault}: {self._server.why()}")
        explained.__cause__ = fault
        return explained

    # --- commands ----------------------------------------------------------------------------------

    async def until_empty(self) -> None:
        """Nothing runs or waits, and no KV is kept."""
        path = f"/flush_cache?timeout={IDLE_TIMEOUT_S}"
        await self.client.post(path, timeout_s=2.0 * IDLE_TIMEOUT_S)

    async def release(self) -> None:
        """Gives memory back, where the server can; returns when it is free."""
        if self._saver and not self._released:
            body = {"tags": list(MEMORY_TAGS)}
            free = self._memory.free_bytes()
            await self.client.post("/release_memory_occupation", body, timeout_s=MEMORY_TIMEOUT_S)
            self._released = list(MEMORY_TAGS)
            await self._memory.until_returned(free, self._held)

    async def take_back(self, *tags: str) -> None:
        """Takes memory again, of what was released."""
        wanted = [tag for tag in tags if tag in self._released]
        if not wanted:
            return
        await self.client.post("/resume_memory_occupation", {"tags": wanted}, timeout_s=MEMORY_TIMEOUT_S)
        self._released = [tag for tag in self._released if tag not in wanted]

    # --- the beginning -----------------------------------------------------------------------------

    async def _start(self) -> ServerInfo:
        cuda = self._served.device == "cuda"
        if cuda:
            self._memory = DeviceMemory(lambda: cuda_memory(self._served.gpu))
        self._saver = cuda and self._config.memory_saver
        await self._memory.until_startable(self._config.mem_fraction_static)
        config = self._config
        if config.kv_storage_bytes:
            self._kv = KvStorage(self._scratch.parent / "sglang-kv", self._scratch, config.kv_storage_bytes)
            config = await self._thread.run(self._kv.configured, config, self._served)
        server = SglangServer(self._served, config, self._log_path)
        info = await server.start()
        self._held = info.held_bytes
        self._server, self.client = server, server.client
        server.ended.add_done_callback(self._server_ended)
        return info

    def _server_ended(self, ended: asyncio.Future[int]) -> None:
        if not self._stopping and self._server is not None:
            fault = EngineFault(self._server.why())
            log.error("sglang_died", code=ended.result(), log=str(self._log_path))
            self._ended(fault)

    async def _meet(self, info: ServerInfo) -> None:
        try:
            check_version(info.version)
        except ValueError as error:
            raise EngineFault(str(error)) from None
        self.delivery = self._delivery(Dialect(bracket=await self.client.has("/begin_weight_update")))
        if self._kv is not None:
            self.delivery = self._kv.fenced(self.delivery, self._thread)
        log.info("sglang_serves", url=self.client.url, version=info.version, own=self.own)

    def _delivery(self, dialect: Dialect) -> Delivery:
        """The fastest way that works from here: CUDA memory on one host, a file in memory on one host of
        CPUs, a process group across hosts."""
        by = self._config.weights_by
        near = self._near()
        cuda = self._served.device == "cuda"
        if by == "auto":
            by = "distributed" if not near else "ipc" if cuda else "disk"
        if by == "disk":
            return ByDisk(self.client, self._thread, self._scratch, self._served.model_folder)
        if by == "ipc":
            return ByIpc(self.client, self._thread, dialect, ranks=self._served.ranks, device=self._device)
        # One GPU cannot be two ranks of an NCCL group.
        nccl = cuda and not near
        return ByGroup(
            self.client,
            self._thread,
            dialect,
            host="127.0.0.1" if near else self._address(),
            ranks=self._served.ranks,
            backend="nccl" if nccl else "gloo",
            device=self._device if nccl else torch.device("cpu"),
        )

    def _near(self) -> bool:
        host = URL(self.client.url).host or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def _address(self) -> str:
        """Ours, as the server's host sees it."""
        url = URL(self.client.url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((url.host, url.port))
            return str(probe.getsockname()[0])
