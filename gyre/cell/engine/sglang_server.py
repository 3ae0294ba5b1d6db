"""A SGLang server of our own: started, watched, stopped, and nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import structlog

from gyre.cell.config import SglangConfig
from gyre.cell.engine import sglang_keeper, sglang_launch
from gyre.cell.engine.base import EngineFault
from gyre.cell.engine.sglang_client import SglangClient
from gyre.cell.engine.sglang_ports import HeldPort
from gyre.cell.engine.sglang_wire import ServerInfo, decode

log = structlog.get_logger()

TAIL_BYTES = 8192
TAIL_LINES = 20
LOOK_EVERY_S = 0.25
PROBE_TIMEOUT_S = 30.0
# It has nothing to save, and a server that is asked sleeps for seconds before it goes.
TERMINATE_S = 1.0
GONE_TIMEOUT_S = 30.0


class SglangServer:
    """One life of a server. `ended` resolves with its exit code when it and all that it started are gone."""

    def __init__(self, served: sglang_launch.Served, config: SglangConfig, log_path: Path) -> None:
        self._served = served
        self._config = config
        self._log_path = log_path
        self._name = f"gyre-{secrets.token_hex(8)}"
        self.key = secrets.token_urlsafe(24)
        self._keeper: subprocess.Popen[bytes] | None = None
        self._ports: list[HeldPort] = []
        self._log_start = 0
        self.client: SglangClient
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """Of its keeper."""
        return self._keeper.pid if self._keeper is not None else 0

    async def start(self) -> ServerInfo:
        """Returns when it serves. Raises EngineFault with the end of its output; then nothing is left."""
        try:
            self._begin()
            async with asyncio.timeout(self._config.start_timeout_s):
                return await self._until_ready()
        except TimeoutError:
            tail = self.tail()
            await self.stop()
            raise EngineFault(
                f"SGLang did not serve after {self._config.start_timeout_s:g} s; its last lines:\n{tail}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    def why(self) -> str:
        """How it ended."""
        code = self.ended.result() if self.ended.done() else None
        return f"the SGLang server ended with code {code}; its last lines in {self._log_path}:\n{self.tail()}"

    def tail(self) -> str:
        """The last lines of its output."""
        try:
            with self._log_path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-TAIL_LINES:])

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to all that is left."""
        keeper = self._keeper
        if keeper is not None and not self.ended.done():
            assert keeper.stdin is not None
            with contextlib.suppress(OSError):
                os.write(keeper.stdin.fileno(), b"t")
            await asyncio.wait([self.ended], timeout=TERMINATE_S)
            with contextlib.suppress(OSError):
                keeper.stdin.close()
            done, _ = await asyncio.wait([self.ended], timeout=GONE_TIMEOUT_S)
            if not done:
                log.error("sglang_not_gone", pid=keeper.pid, waited_s=GONE_TIMEOUT_S)
        for port in self._ports:
            port.close()
        if hasattr(self, "client"):
            await self.client.close()

    def _begin(self) -> None:
        self._ports = [HeldPort(), HeldPort()]
        http, rendezvous = self._ports
        for port in self._ports:
            if port.answers():
                raise EngineFault(f"somebody listens at port {port.number}, which was free a moment ago")
        argv = sglang_launch.command(
            self._config.python or Path(sys.executable),
            self._served,
            sglang_launch.Ports(http=http.number, rendezvous=rendezvous.number),
            name=self._name,
            key=self.key,
            mem_fraction_static=self._config.mem_fraction_static,
            memory_saver=self._config.memory_saver,
            arguments=self._config.arguments,
        )
        environment = sglang_launch.environment(self._served, self._config.environment)
        self.client = SglangClient(f"http://127.0.0.1:{http.number}", self.key)
        self._keeper = self._popen(argv, environment)
        log.info("sglang_started", pid=self._keeper.pid, port=http.number, log=str(self._log_path))
        self._watch(self._keeper, self._keeper_ended)

    def _popen(self, argv: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as output:
            self._log_start = output.tell()
            return subprocess.Popen(
                [sys.executable, "-I", "-S", sglang_keeper.__file__, *argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def _watch(self, keeper: subprocess.Popen[bytes], then: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(keeper.pid)

        def on_exit() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            then(keeper.wait())

        loop.add_reader(pidfd, on_exit)

    def _keeper_ended(self, code: int) -> None:
        assert self._keeper is not None and self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        log.info("sglang_ended", pid=self._keeper.pid, code=code)
        self.ended.set_result(code)

    async def _until_ready(self) -> ServerInfo:
        while True:
            await asyncio.wait([self.ended], timeout=LOOK_EVERY_S)
            if self.ended.done():
                raise EngineFault(self.why())
            with contextlib.suppress(EngineFault):
                await self.client.get("/health_generate", timeout_s=PROBE_TIMEOUT_S)
                break
        info = decode(await self.client.get("/server_info"), ServerInfo, "/server_info")
        if info.served_model_name != self._name:
            raise EngineFault(f"another server than ours answers at {self.client.url}")
        return info
