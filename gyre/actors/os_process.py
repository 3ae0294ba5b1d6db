"""A process of the operating system, and how it comes to be: executed, or forked by a fork server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gyre.actors.boot import Boot, ServerBoot
from gyre.actors.forking.messages import (
    Exited,
    Forked,
    ForkRequest,
    Refused,
    memory_file,
    received_reply,
    send_request,
)
from gyre.actors.forking.orphan import ended_with

# A server that still imports answers after that: seconds on an idle machine.
FORK_WAIT_S = 60.0


class NotForked(Exception):
    """The server is not there, or refuses."""


class OsProcess(Protocol):
    """It leads a session and a group of its own. Until `exit` is done its pid is no other's."""

    pid: int
    # Its code, negative where it was a signal, None where nobody knows; then nothing of its group is left.
    exit: asyncio.Future[int | None]

    def signal(self, number: signal.Signals) -> None:
        """To its group, until `exit` is done; no other's, ever."""


class ExecutedProcess:
    """A new interpreter, watched by its pidfd."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        boot: Boot,
        environment: Mapping[str, str],
        output: int,
        inherits: Sequence[int] = (),
    ) -> None:
        self._loop = loop
        module = ["gyre.actors.child", boot.name]
        self._process = start_python(module, boot, environment, output, inherits)
        self.pid = self._process.pid
        self.exit: asyncio.Future[int | None] = loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        loop.add_reader(self._pidfd, self._on_exit)

    def signal(self, number: signal.Signals) -> None:
        _signal_group(self.pid, number)

    def _on_exit(self) -> None:
        self.signal(signal.SIGKILL)  # what it left
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.exit.set_result(self._process.wait())


class ForkedProcess:
    """A child of the fork server's, which tells how it ended. It outlives the server, and is watched by its
    pidfd then, but not this process: the kernel kills it when this one's end of a pipe is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._forked: asyncio.Future[None] = loop.create_future()
        self._files: list[int] = []
        self._pidfd = -1
        self.pid = 0
        self.exit: asyncio.Future[int | None] = loop.create_future()

    async def fork(self, server: str, request: ForkRequest, output: int) -> None:
        """NotForked; OSError where it was given up."""
        try:
            self._ask(server, request, output)
        except OSError as error:
            self._close()
            raise NotForked(str(error)) from error
        self._loop.add_reader(self._connection, self._hear)
        try:
            async with asyncio.timeout(FORK_WAIT_S):
                await self._forked
        except BaseException as error:
            self._close()
            if isinstance(error, TimeoutError):
                raise NotForked(f"no answer within {FORK_WAIT_S:g} s") from error
            raise

    def _ask(self, server: str, request: ForkRequest, output: int) -> None:
        its_end, ours = os.pipe()
        self._files.append(ours)
        try:
            self._connection.connect(server)
            send_request(self._connection, request, output, its_end)
        finally:
            os.close(its_end)

    def signal(self, number: signal.Signals) -> None:
        """Where the server has died, another reaps it: then its number is another's, or that of what is left
        of its group and nobody else's."""
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            if os.path.exists(f"/proc/{self.pid}"):
                return
        _signal_group(self.pid, number)

    def give_up(self) -> None:
        self._not_forked(OSError("it is not wanted any more"))

    def _hear(self) -> None:
        try:
            reply, files = received_reply(self._connection)
        except BlockingIOError:
            return
        self._files += files
        match reply:
            case Forked(pid) if files:
                self.pid, self._pidfd = pid, files[0]
                if not self._forked.done():
                    self._forked.set_result(None)
            case Refused(why):
                self._not_forked(NotForked(why))
            case _ if self._pidfd < 0:
                self._not_forked(NotForked("the server, or what it has forked, has died"))
            case Exited(code):
                self._over(code)
            case None:
                self._server_died()

    def _not_forked(self, error: Exception) -> None:
        if not self._forked.done():
            self._forked.set_exception(error)

    def _server_died(self) -> None:
        self._loop.remove_reader(self._connection)
        self._loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        code = ended_with(self.pid, self._pidfd)
        self.signal(signal.SIGKILL)  # what it left
        self._over(code)

    def _over(self, code: int | None) -> None:
        self._close()
        self.exit.set_result(code)

    def _close(self) -> None:
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)
            self._connection.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            self._pidfd = -1
        while self._files:
            os.close(self._files.pop())


def start_python(
    module: list[str],
    boot: Boot | ServerBoot,
    environment: Mapping[str, str],
    output: int,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Not in a thread: PR_SET_PDEATHSIG fires when the *thread* that started the child ends."""
    stdin = memory_file(boot)
    try:
        return subprocess.Popen(
            [sys.executable, "-u", "-X", "faulthandler", "-m", *module],
            stdin=stdin,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    finally:
        os.close(stdin)


def environment_with(extra: Mapping[str, str]) -> dict[str, str]:
    """This process' own, and where this package is."""
    root = str(Path(__file__).parents[2])
    path = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **extra, "PYTHONPATH": os.pathsep.join(path)}


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
