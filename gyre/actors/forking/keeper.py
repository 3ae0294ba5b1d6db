"""Starts a machine's fork server, and another where it dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from gyre.actors.actor import Actor
from gyre.actors.boot import ServerBoot
from gyre.actors.log import log
from gyre.actors.os_process import environment_with, start_python
from gyre.actors.output import Output

# One that keeps dying is left alone: processes are started as they are without.
MOST_DEATHS = 3
WINDOW_S = 60.0
BACKLOG = 128


class ForkServer(Actor):
    """Processes of this node, and of those that it starts, whose spec says `fork` are forked by a process
    that has imported `modules` under `environment`, on top of this one's own. What it prints goes to
    `log_path`, or only its last lines are kept; its socket is in a folder of its own `within` that one, by
    default the one for temporary files. What it has forked outlives it, and ends with who asked for it."""

    def __init__(
        self,
        modules: tuple[str, ...],
        environment: Mapping[str, str],
        log_path: Path | None = None,
        within: Path | None = None,
    ) -> None:
        self._modules = modules
        self._environment = environment
        self._log_path = log_path
        self._within = within
        self._process: subprocess.Popen[bytes] | None = None
        self.deaths: deque[float] = deque(maxlen=MOST_DEATHS)

    async def started(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gyre-fork-", dir=self._within))
        try:
            life = self._start()
        except OSError as error:
            shutil.rmtree(self._folder)
            log.warning("no_fork_server", reason=str(error))
            return
        self.context.node.fork_server = str(self._socket)
        self.context.run(self._keep(life), name="fork server")

    async def _keep(self, life: asyncio.Future[str]) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                log.warning("fork_server_died", reason=await life)
                self.deaths.append(loop.time())
                if len(self.deaths) == MOST_DEATHS and loop.time() - self.deaths[0] < WINDOW_S:
                    return
                life = self._start()
        except OSError as error:
            log.warning("no_fork_server", reason=str(error))
        finally:
            self.context.node.fork_server = ""
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._process is not None:
                self._process.kill()
                await asyncio.wait([life])

    @property
    def _socket(self) -> Path:
        return self._folder / "socket"

    def _start(self) -> asyncio.Future[str]:
        """Done when it has died, and how."""
        loop = asyncio.get_running_loop()
        output = Output(loop, self._log_path)
        try:
            process = start_fork_server(self._socket, self._modules, self._environment, output.fd)
        except OSError:
            output.close()
            raise
        output.started()
        self._process = process
        ended: asyncio.Future[str] = loop.create_future()
        pidfd = os.pidfd_open(process.pid)

        def on_exit() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            code, tail = process.wait(), output.close()
            self._process = None
            if not ended.done():
                ended.set_result("\n".join([f"exit code {code}", *tail]))

        loop.add_reader(pidfd, on_exit)
        log.info("fork_server_started", pid=process.pid)
        return ended


def start_fork_server(
    where: Path,
    modules: tuple[str, ...],
    environment: Mapping[str, str],
    output: int,
    *,
    lazy: bool = False,
) -> subprocess.Popen[bytes]:
    """It listens at `where`, and dies with the thread that has started it. OSError."""
    boot = ServerBoot(
        modules=modules,
        lazy=lazy,
        parent_pid=os.getpid(),
        sys_path=[str(Path(entry).absolute()) for entry in sys.path],
        python_path=os.environ.get("PYTHONPATH"),
    )
    where.unlink(missing_ok=True)
    # Before it is started: who asks it meanwhile waits, and learns of its death.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(where))
        listener.listen(BACKLOG)
        return start_python(
            ["gyre.actors.forking.server", str(listener.fileno())],
            boot,
            environment_with(environment),
            output,
            (listener.fileno(),),
        )
