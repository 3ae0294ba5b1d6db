"""What a command can see and reach: the contract of sandboxes, and a plain process as its simplest form."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from gyre.harness.config import HarnessConfig, LimitsConfig
from gyre.harness.output import Output
from gyre.harness.process import Child, Exit, NeverStarted
from gyre.harness.task import Task, least


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder of the host that a command may use, and where a sandbox with a file system of its
    own shows it."""

    host: Path
    inside: str
    writable: bool = False


class Limits(LimitsConfig, frozen=True, kw_only=True):
    """Of one sandbox: of each file, and of all that runs in it together. Only of files where it has no
    walls."""

    file_bytes: int


def limits_of(config: HarnessConfig, task: Task | None = None) -> Limits:
    """A job's, for a task of it. No file may be larger than the workspace that it may be in."""
    limits = Limits(file_bytes=config.max_workspace_bytes, **msgspec.structs.asdict(config.limits))
    if task is None:
        return limits
    return msgspec.structs.replace(
        limits,
        memory_bytes=least(limits.memory_bytes, task.memory_bytes),
        disk_bytes=least(limits.disk_bytes, task.disk_bytes),
    )


class Confined(msgspec.Struct, frozen=True, kw_only=True):
    """A command to be run in a sandbox. Its paths and URL are those of the inside. It can use `mounts`, and
    `socket` is the proxy's, its only network. `mark` is its name in its environment."""

    command: tuple[str, ...]
    environment: dict[str, str]
    workspace: Mount
    mounts: tuple[Mount, ...]
    socket: Path | None
    mark: str
    limits: Limits


class SandboxMissing(Exception):
    """A sandbox cannot be used on this machine."""

    def __init__(self, sandbox: str, reason: str, fix: str) -> None:
        super().__init__(f"harness.sandbox = {sandbox!r} cannot be used: {reason}; {fix}")
        self.sandbox = sandbox
        self.reason = reason
        self.fix = fix


class Running(Protocol):
    """A command that was started. `end` must follow in every case."""

    @property
    def pid(self) -> int:
        """Of the outermost process: who kills it kills the command."""

    async def exit(self) -> Exit:
        """Waits for its end. `timed_out` is not known here."""

    async def end(self) -> None:
        """Kills it and all that it started, and waits until they are gone."""


class Sandbox(Protocol):
    """Starts commands. All implementations pass tests/harness/test_sandbox.py."""

    def check(self) -> None:
        """Blocking, once. Raises SandboxMissing."""

    def path(self, mount: Mount) -> str:
        """Where the command finds it."""

    def base_url(self, base_url: str) -> str:
        """Where the command finds the proxy, which listens at `base_url` outside."""

    def start(self, confined: Confined, output: Output, errors: Output | None = None) -> Running:
        """Raises NeverStarted. Standard error goes to `errors`, or with the output."""


# Limits are set on the way: Popen's way (preexec_fn) forks this process, and from outside is too late.
_LIMITED = 'ulimit -c 0; ulimit -f "$0"; exec "$@"'


class ProcessSandbox:
    """No walls: a process group of its own with a clean environment. It sees the host's files and network."""

    def check(self) -> None:
        pass

    def path(self, mount: Mount) -> str:
        return str(mount.host)

    def base_url(self, base_url: str) -> str:
        return base_url

    def start(self, confined: Confined, output: Output, errors: Output | None = None) -> ProcessRun:
        program, cwd = confined.command[0], confined.workspace.host
        path = confined.environment.get("PATH")
        if shutil.which(cwd / program if "/" in program else program, path=path) is None:
            raise NeverStarted(program, "there is no such program")
        blocks = str(max(1, confined.limits.file_bytes // 512))
        child = Child(
            ("/bin/sh", "-c", _LIMITED, blocks, *confined.command),
            cwd=cwd,
            environment=confined.environment,
            mark=confined.mark,
            output=output,
            errors=errors,
        )
        return ProcessRun(child)


class ProcessRun:
    def __init__(self, child: Child) -> None:
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    async def exit(self) -> Exit:
        code = await self._child.returncode()
        if code < 0:
            return Exit(kind="killed", signal=-code)
        return Exit(kind="exited", code=code)

    async def end(self) -> None:
        await self._child.end()


async def run(
    sandbox: Sandbox,
    confined: Confined,
    output: Output,
    errors: Output | None = None,
    *,
    timeout_s: float,
    on_start: Callable[[int], None] | None = None,
) -> Exit:
    """Runs a command to its end or its time-out. Whatever happens, also when this is cancelled, nothing of
    it runs any more afterwards. Raises nothing but what cancels it."""
    try:
        running = sandbox.start(confined, output, errors)
    except NeverStarted as error:
        return Exit(kind="never_started", detail=str(error))
    try:
        if on_start is not None:
            on_start(running.pid)
        async with asyncio.timeout(timeout_s):
            return await running.exit()
    except TimeoutError:
        return Exit(kind="timed_out")
    finally:
        await running.end()
