"""What carries a child process: the operating system, unless a simulation does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gyre.actors.boot import Boot
from gyre.actors.forking.messages import FORK_SERVER, ForkRequest
from gyre.actors.forking.surroundings import surroundings
from gyre.actors.log import log
from gyre.actors.os_process import (
    ExecutedProcess,
    ForkedProcess,
    NotForked,
    OsProcess,
    environment_with,
)
from gyre.actors.output import Output
from gyre.actors.specs import ProcessSpec

if TYPE_CHECKING:
    from gyre.actors.node import Node

# Exit code, negative where it was a signal, None where nobody knows; and the last lines of its output.
OnEnd = Callable[[int | None, tuple[str, ...]], None]


class Carrier(Protocol):
    """One process to be."""

    pid: int

    async def start(self, boot: Boot, ended: OnEnd) -> None:
        """Starts `python -m gyre.actors.child`, or what comes to the same; `ended` is called once, when it is
        gone. OSError."""

    def signal(self, number: signal.Signals) -> None:
        """To it and all that it started; nothing where it is gone."""


class OsCarrier:
    """A process of its own session: forked where its spec wants that and a fork server can, else executed."""

    def __init__(self, node: Node, spec: ProcessSpec) -> None:
        self._node = node
        self._spec = spec
        self._output = Output(node.loop, spec.log_path)
        self._forking: ForkedProcess | None = None
        self._process: OsProcess | None = None
        self._unwanted = False
        self._ended: OnEnd
        self.pid = 0

    async def start(self, boot: Boot, ended: OnEnd) -> None:
        self._ended = ended
        try:
            self._process = await self._start(boot)
        except BaseException:
            self._output.close()
            raise
        self.pid = self._process.pid
        self._output.started()
        self._process.exit.add_done_callback(self._on_exit, context=self._node.context)
        if self._unwanted:
            self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        if self._process is None:
            self._unwanted = True
            if self._forking is not None:
                self._forking.give_up()
        elif not self._process.exit.done():
            self._process.signal(number)

    async def _start(self, boot: Boot) -> OsProcess:
        server = self._node.fork_server
        environment = environment_with(
            {**({FORK_SERVER: server} if server else {}), **self._spec.environment}
        )
        if self._spec.fork and server:
            try:
                return await self._fork(boot, environment)
            except NotForked as error:
                log.info("not_forked", process=boot.name, reason=str(error))
        return ExecutedProcess(self._node.loop, boot, environment, self._output.fd, self._spec.inherits)

    async def _fork(self, boot: Boot, environment: dict[str, str]) -> OsProcess:
        request = ForkRequest(
            boot=boot, environment=environment, surroundings=surroundings(), folder=os.getcwd()
        )
        self._forking = process = ForkedProcess(self._node.loop)
        try:
            await process.fork(self._node.fork_server, request, self._output.fd)
        finally:
            self._forking = None
        return process

    def _on_exit(self, exit: asyncio.Future[int | None]) -> None:
        self._ended(exit.result(), self._output.close())
