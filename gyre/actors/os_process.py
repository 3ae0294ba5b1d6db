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

# A server that still imports answers after that: seconds on an idle machine.
FORK_WAIT_S = 60.0


class NotForked(Exception):
    """The server is not there, or refuses."""


class OsProcess(Protocol):
    """It leads a session and a group of its own. Until `exit` is done its pid is no other's."""

    pid: int
    exit: asyncio.Future[int]  # its code, negative where it was a signal; then nothing of its group is left

    def signal(self, number: signal.Signals) -> None:
        """To its group, until `exit` is done; no other's, ever."""


class ExecutedProcess:
    """A new interpreter, watched by its pidfd."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, boot: Boot, environment: Mapping[str, str], output: int
    ) -> None:
        self._loop = loop
        self._process = start_python(["gyre.actors.child", boot.name], boot, environment, output)
        self.pid = self._process.pid
        self.exit: asyncio.Future[int] = loop.create_future()
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
    """A child of the fork server's, which kills it when this connection is closed, as the kernel does when
    the server dies."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._forked: asyncio.Future[int] = loop.create_future()
        self.pid = 0
        self._pidfd = -1
        self.exit: asyncio.Future[int] = loop.create_future()

    async def fork(self, server: str, request: ForkRequest, output: int) -> None:
        """NotForked; OSError where it was given up."""
        try:
            self._connection.connect(server)
            send_request(self._connection, request, output)
        except OSError as error:
            self._connection.close()
            raise NotForked(str(error)) from error
        self._loop.add_reader(self._connection, self._hear)
        try:
            async with asyncio.timeout(FORK_WAIT_S):
                self.pid = await self._forked
        except BaseException as error:
            self._close()
            if isinstance(error, TimeoutError):
                raise NotForked(f"no answer within {FORK_WAIT_S:g} s") from error
            raise

    def signal(self, number: signal.Signals) -> None:
        """Where the server has died, init reaps it: then its number is another's, or that of what is left of
        its group and nobody else's."""
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
            reply = received_reply(self._connection)
        except BlockingIOError:
            return
        match reply:
            case Forked(pid):
                if not self._forked.done():
                    self._is_forked(pid)
            case Refused(why):
                self._not_forked(NotForked(why))
            case Exited() | None if not self._forked.done():
                self._not_forked(NotForked("the server, or what it has forked, has died"))
            case Exited(code):
                self._over(code)
            case None:
                self._server_died()

    def _not_forked(self, error: Exception) -> None:
        if not self._forked.done():
            self._forked.set_exception(error)

    def _is_forked(self, pid: int) -> None:
        """Its server, where it still lives then, has not reaped it when its pidfd is opened."""
        try:
            self._pidfd = os.pidfd_open(pid)
            is_gone = not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            is_gone = False
        except OSError:
            is_gone = True
        if is_gone:
            self._not_forked(NotForked("the server has died"))
        else:
            self._forked.set_result(pid)

    def _server_died(self) -> None:
        """The kernel ends what it has forked, but not what that has started."""
        if self._forked.cancelled() or self._forked.exception() is not None:
            return  # it is being closed
        self._loop.remove_reader(self._connection)
        self.pid = self._forked.result()
        self.signal(signal.SIGKILL)
        self._loop.add_reader(self._pidfd, self._over, -signal.SIGKILL)

    def _over(self, code: int) -> None:
        self._close()
        self.exit.set_result(code)

    def _close(self) -> None:
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)
            self._connection.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


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
