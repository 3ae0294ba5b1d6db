"""One command as a process group of its own: started, waited for, and killed with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from gyre.harness import guardian
from gyre.harness.guardian import MARK, kill_marked
from gyre.harness.output import Output, OutputReader

log = structlog.get_logger()

# How long a killed process may take to be gone: one that waits for a dead disk never is.
GONE_TIMEOUT_S = 10.0


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended. `code` where it exited, `signal` where it was killed by somebody else; with
    `timed_out`, `never_started` and `lost`, which is with its machine, neither. `detail` is for people."""

    kind: Literal["exited", "killed", "timed_out", "never_started", "lost"]
    code: int | None = None
    signal: int | None = None
    detail: str = ""


class NeverStarted(Exception):
    """The operating system refused to start `program`."""

    def __init__(self, program: str, reason: str) -> None:
        super().__init__(f"cannot start {program!r}: {reason}")
        self.program = program
        self.reason = reason


class ProcessWatch:
    """Tells on the running loop when a process has ended. It may still be unreaped then."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._loop.add_reader(self._fd, self._on_end)

    async def ended(self) -> None:
        await self._ended.wait()

    def kill(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_end(self) -> None:
        self._loop.remove_reader(self._fd)
        self._ended.set()


class Child:
    """A started command. `end` must follow in every case: it leaves no process of it behind."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        environment: dict[str, str],
        mark: str,
        output: Output,
        errors: Output | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Raises NeverStarted. `mark` is found again in the environment of what it starts; its standard
        error goes to `errors`, or with its output."""
        self._mark = mark
        self._popen, self._readers = _start(
            argv, cwd, {**environment, MARK: mark}, output, errors, tuple(pass_fds)
        )
        self._returncode: int | None = None
        try:
            self._watch = ProcessWatch(self._popen.pid)
        except OSError as error:
            self._kill_group()
            self._popen.wait()
            raise NeverStarted(argv[0], str(error)) from error

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def returncode(self) -> int:
        """Waits for its end; negative is a signal. Its process group is killed before it is reaped: until
        then nobody else can have its number."""
        await self._watch.ended()
        if self._returncode is None:
            self._kill_group()
            self._returncode = self._popen.wait()
        return self._returncode

    async def end(self) -> None:
        """Kills it and all that it started, and waits until they are gone."""
        try:
            self._kill_group()
            async with asyncio.timeout(GONE_TIMEOUT_S):
                await self.returncode()
            await asyncio.to_thread(kill_marked, self._mark)
        except TimeoutError:
            log.error("process_not_gone", pid=self.pid, mark=self._mark, waited_s=GONE_TIMEOUT_S)
        finally:
            self._watch.close()
            for reader in self._readers:
                reader.close()

    def _kill_group(self) -> None:
        if self._returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)


def _start(
    argv: Sequence[str],
    cwd: Path,
    environment: dict[str, str],
    output: Output,
    errors: Output | None,
    pass_fds: tuple[int, ...],
) -> tuple[subprocess.Popen[bytes], list[OutputReader]]:
    outputs = [output] if errors is None else [output, errors]
    pipes: list[tuple[int, int]] = []
    try:
        pipes.extend(os.pipe() for _ in outputs)
        # It takes 1-2 ms and is not done in a thread, because a process that is to die with its parent
        # dies with the thread that started it.
        popen = subprocess.Popen(
            argv,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipes[0][1],
            stderr=pipes[-1][1],
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except (OSError, ValueError) as error:
        for reading, _ in pipes:
            os.close(reading)
        raise NeverStarted(argv[0], str(error)) from error
    finally:
        for _, writing in pipes:
            os.close(writing)
    readers = [OutputReader(pipe[0], out) for pipe, out in zip(pipes, outputs, strict=True)]
    return popen, readers


def start_guardian(guard: str) -> subprocess.Popen[bytes]:
    """A small process that kills what carries the mark when this one is gone, however it went."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, guard],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
