"""What carries a child process: the operating system, unless a simulation does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from gyre.actors.boot import Boot
from gyre.actors.output import Output
from gyre.actors.specs import ProcessSpec

if TYPE_CHECKING:
    from gyre.actors.node import Node

# Exit code, negative where it was a signal, and the last lines of its output.
OnEnd = Callable[[int, tuple[str, ...]], None]


class Carrier(Protocol):
    """One process to be."""

    pid: int

    def start(self, boot: Boot, ended: OnEnd) -> None:
        """Starts `python -m gyre.actors.child`; `ended` is called once, when it is gone. OSError."""

    def signal(self, number: signal.Signals) -> None:
        """To it and all that it started; nothing where it is gone."""


class OsProcess:
    """A process of its own session, watched by its pidfd."""

    def __init__(self, node: Node, spec: ProcessSpec) -> None:
        self._loop = node.loop
        self._spec = spec
        self._output = Output(node.loop, spec.log_path)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._ended: OnEnd
        self.pid = 0

    def start(self, boot: Boot, ended: OnEnd) -> None:
        self._ended = ended
        try:
            self._process = self._popen(boot)
        except OSError:
            self._output.close()
            raise
        self.pid = self._process.pid
        self._output.started()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    def signal(self, number: signal.Signals) -> None:
        # Before it is reaped its pid cannot be another's.
        if self._process is not None and self._process.returncode is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return

    def _popen(self, boot: Boot) -> subprocess.Popen[bytes]:
        # Not in a thread: PR_SET_PDEATHSIG fires when the *thread* that started the child ends.
        stdin = os.memfd_create("gyre-boot")
        try:
            os.write(stdin, msgspec.msgpack.encode(boot))
            os.lseek(stdin, 0, os.SEEK_SET)
            return subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-m", "gyre.actors.child", self._spec.name],
                stdin=stdin,
                stdout=self._output.fd,
                stderr=self._output.fd,
                env=_environment(self._spec.environment),
                start_new_session=True,
            )
        finally:
            os.close(stdin)

    def _on_exit(self) -> None:
        assert self._process is not None
        self.signal(signal.SIGKILL)  # what it left of its group
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self._ended(code, self._output.close())


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    path = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **extra, "PYTHONPATH": os.pathsep.join(path)}
