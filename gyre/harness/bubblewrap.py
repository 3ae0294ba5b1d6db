"""The sandbox of bubblewrap: own file system, processes and network; the proxy's socket is the way out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from gyre.harness import bridge, seccomp, usage
from gyre.harness.guardian import MARK
from gyre.harness.output import Output
from gyre.harness.process import GONE_TIMEOUT_S, Child, Exit, NeverStarted, ProcessWatch
from gyre.harness.pythons import parts_of
from gyre.harness.sandbox import Confined, Mount, SandboxMissing

PORT = 4181
USER = 1000
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = (
    "alternatives",
    "ca-certificates",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "protocols",
    "services",
    "ssl",
    "timezone",
)
OWN_ETC = {
    "passwd": f"agent:x:{USER}:{USER}::/home/agent:/bin/sh\n",
    "group": f"agent:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost workspace\n",
}
CODE = "/gyre/code"
# What the first process consists of, named as it is outside.
MODULES = (bridge, seccomp, usage)
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from gyre.harness.bridge import main; "
    "sys.exit(main(sys.argv[2:]))"
)
# As Docker has it.
SHARED_MEMORY_BYTES = 64 << 20
SOCKET_FOLDER = "/gyre/proxy"


class Bubblewrap:
    """`folder` receives the few files that a sandbox's /etc needs. All sandboxes look alike from inside
    (paths, user, host name, port): what an agent writes of them into its prompts is the same in all
    executions of a group, whose prompts then share more."""

    def __init__(self, folder: Path) -> None:
        self._etc = folder / "etc"
        self._bwrap = shutil.which("bwrap") or "bwrap"
        self._filter = seccomp.program() or b""

    def check(self) -> None:
        fix = (
            "install the Debian package bubblewrap, 0.8 or newer, or set it to 'process' where harnesses may "
            "be trusted"
        )
        if not self._filter:
            reason = f"no filter of system calls is known for a machine of {os.uname().machine}"
            raise SandboxMissing("bubblewrap", reason, "set it to 'process' where harnesses may be trusted")
        if shutil.which("bwrap") is None:
            raise SandboxMissing("bubblewrap", "there is no program bwrap", fix)
        self._etc.mkdir(parents=True, exist_ok=True)
        for name, text in OWN_ETC.items():
            (self._etc / name).write_text(text)
        probe = [*self._root(), "--", sys.executable, "-I", "-S", "-c", "import socket"]
        result = subprocess.run(probe, capture_output=True, text=True, timeout=30)
        if result.returncode:
            raise SandboxMissing("bubblewrap", result.stderr.strip() or f"exit {result.returncode}", fix)

    def path(self, mount: Mount) -> str:
        return mount.inside

    def base_url(self, base_url: str) -> str:
        return f"http://127.0.0.1:{PORT}{urlsplit(base_url).path}"

    def start(self, confined: Confined, output: Output, errors: Output | None = None) -> BubblewrapRun:
        info, status, filter_ = (_pipe(confined.command[0]) for _ in range(3))
        try:
            os.write(filter_[1], self._filter)
            os.close(filter_[1])
            child = Child(
                self._argv(confined, info[1], status[1], filter_[0]),
                cwd=confined.workspace.host,
                environment=confined.environment,
                mark=confined.mark,
                output=output,
                errors=errors,
                pass_fds=(info[1], status[1], filter_[0]),
            )
        except NeverStarted:
            os.close(info[0])
            os.close(status[0])
            raise
        finally:
            for fd in (info[1], status[1], filter_[0]):
                os.close(fd)
        return BubblewrapRun(child, confined.mark, info[0], status[0], errors or output)

    def _argv(self, confined: Confined, info_fd: int, status_fd: int, filter_fd: int) -> list[str]:
        argv = [*self._root(), "--info-fd", str(info_fd)]
        argv += ["--seccomp", str(filter_fd)]
        for mount in (confined.workspace, *confined.mounts):
            argv += ["--bind" if mount.writable else "--ro-bind", str(mount.host), mount.inside]
        port, socket = 0, "-"
        if confined.socket is not None:
            # Its folder and not the socket itself, which is another file after a restart of the proxy.
            argv += ["--ro-bind", str(confined.socket.parent), SOCKET_FOLDER]
            port, socket = PORT, f"{SOCKET_FOLDER}/{confined.socket.name}"
        argv += ["--remount-ro", "/", "--chdir", confined.workspace.inside, "--"]
        argv += [sys.executable, "-I", "-S", "-c", START, CODE, str(status_fd)]
        limits = ":".join(str(getattr(confined.limits, name)) for name in bridge.FIELDS)
        writable = [mount.inside for mount in (confined.workspace, *confined.mounts) if mount.writable]
        return [*argv, limits, str(port), socket, str(len(writable)), *writable, *confined.command]

    def _root(self) -> list[str]:
        argv = [self._bwrap, "--unshare-user", "--unshare-all", "--die-with-parent", "--new-session"]
        argv += ["--as-pid-1"]
        argv += ["--cap-drop", "ALL", "--uid", str(USER), "--gid", str(USER), "--hostname", "workspace"]
        for folder in SYSTEM:
            if os.path.islink(folder):
                argv += ["--symlink", os.readlink(folder), folder]
            elif os.path.isdir(folder):
                argv += ["--ro-bind", folder, folder]
        for name in ETC:
            argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for name in OWN_ETC:
            argv += ["--ro-bind", str(self._etc / name), f"/etc/{name}"]
        # The user of a job that root runs is still root to the files of /proc/sys, also without a capability.
        argv += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
        argv += ["--dev", "/dev", "--remount-ro", "/dev"]
        argv += ["--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
        argv += ["--tmpfs", "/tmp", "--symlink", "../tmp", "/var/tmp"]
        for prefix in python_folders():
            argv += ["--ro-bind", prefix, prefix]
        for module in MODULES:
            inside = f"{CODE}/{module.__name__.replace('.', '/')}.py"
            argv += ["--ro-bind", str(module.__file__), inside]
        return argv


class BubblewrapRun:
    """`info_fd` tells the number of the sandbox's first process, `status_fd` the command's fate."""

    def __init__(self, child: Child, mark: str, info_fd: int, status_fd: int, errors: Output) -> None:
        self._child = child
        self._mark = mark
        self._info_fd = info_fd
        self._status_fd = status_fd
        self._errors = errors

    @property
    def pid(self) -> int:
        return self._child.pid

    async def exit(self) -> Exit:
        code = await self._child.returncode()
        return exit_of(_read(self._status_fd), code, self._errors.tail())

    async def end(self) -> None:
        """The sandbox's first process is gone only when all others in it are."""
        watch = self._first_process()
        try:
            if watch is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GONE_TIMEOUT_S):
                        await watch.ended()
            await self._child.end()
        finally:
            if watch is not None:
                watch.close()
            os.close(self._info_fd)
            os.close(self._status_fd)

    def _first_process(self) -> ProcessWatch | None:
        """Killed, or about to be gone; None where there is none (any more)."""
        # It is written piece by piece, and may not be complete yet.
        told = re.search(r'"child-pid": (\d+)', _read(self._info_fd))
        if told is None:
            return None
        pid = int(told[1])
        try:
            watch = ProcessWatch(pid)
        except OSError:
            return None
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            environment = b""
        if environment and f"{MARK}={self._mark}\0".encode() not in environment:
            watch.close()
            return None
        watch.kill()
        return watch


def exit_of(told: str, code: int, said: str) -> Exit:
    """From what the first process told of the command, bubblewrap's exit code (negative: a signal) and what
    they printed."""
    status = dict(line.partition(" ")[::2] for line in told.splitlines())
    if "limit" in status:
        return _ended_by_first(f"more than harness.limits.{status['limit']}")
    if "fault" in status:
        return _ended_by_first(f"the sandbox's first process failed: {status['fault']}")
    if "exit" in status:
        return Exit(kind="exited", code=int(status["exit"]))
    if "signal" in status:
        return Exit(kind="killed", signal=int(status["signal"]))
    if code < 0:
        return Exit(kind="killed", signal=-code)
    if "started" not in status:
        detail = status.get("failed") or said.strip()[-500:] or f"bwrap: exit {code}"
        return Exit(kind="never_started", detail=detail)
    # From outside a first process can be ended in one way only. All others may be the command's doing, for
    # which there is no other attempt.
    if code == bridge.KILLED:
        return Exit(kind="killed", signal=signal.SIGKILL)
    return _ended_by_first(f"the sandbox's first process failed: exit {code}")


def _ended_by_first(why: str) -> Exit:
    return Exit(kind="exited", code=bridge.KILLED, detail=f"all of it was killed: {why}")


def python_folders() -> Iterator[str]:
    """Where this Python and its packages lie, outside of the system's folders."""
    executable = Path(sys.executable).resolve().parent.parent
    home = Path("~").expanduser()
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix, sys.base_exec_prefix, str(executable))):
        if prefix.startswith("/usr") or prefix == "/":
            continue
        yield from map(str, parts_of(Path(prefix))) if home.is_relative_to(prefix) else [prefix]


def _pipe(program: str) -> tuple[int, int]:
    try:
        return os.pipe()
    except OSError as error:
        raise NeverStarted(program, str(error)) from error


def _read(fd: int) -> str:
    """What is in a pipe now."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 65536).decode(errors="replace")
    except BlockingIOError:
        return ""
