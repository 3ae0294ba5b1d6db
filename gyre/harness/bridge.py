"""The first program inside a bubblewrap sandbox: runs the command, and is its only way out.

A sandbox has a network of its own with nothing in it but a loopback. The bridge listens there and relays
bytes to the proxy's unix socket, which is mounted into the sandbox. Standard library only, few imports: it
starts once per execution, with the words STATUS_FD LIMITS PORT SOCKET COUNT FOLDER... COMMAND...; port 0
relays nothing. LIMITS are those of FIELDS with `:` between them, each FOLDER can be written to.

It kills all that runs in the sandbox when that becomes too much, which is an exit with code 137. It does so
as the first process of the sandbox, to which no other of it can send a signal or attach itself.

On STATUS_FD it says what happened to the command: `started`, then `exit CODE` or `signal NUMBER`, and
`limit NAME = VALUE` before it where that was exceeded, `fault REASON` where it was this program that failed;
or `failed REASON` where it could not be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from gyre.harness import seccomp
from gyre.harness.usage import Watch

CHUNK_BYTES = 65536
BUFFER_BYTES = 1 << 20
# Files that it may need beside connections, which are of two each.
OWN_FILES = 64
FIELDS = ("file_bytes", "memory_bytes", "processes", "threads", "disk_bytes")
WATCH_EVERY_S = 0.1
KILLED = 128 + signal.SIGKILL
PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 22, 2


class Filter(ctypes.Structure):
    """What the kernel is given of one."""

    _fields_ = (("steps", ctypes.c_ushort), ("code", ctypes.c_char_p))


class Pipe:
    """One direction of a relayed connection: what was read of `source` and is not yet written to `sink`."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.buffer = bytearray()
        self.source_ended = False
        self.is_done = False

    @property
    def wants_read(self) -> bool:
        return not self.source_ended and len(self.buffer) < BUFFER_BYTES

    @property
    def wants_write(self) -> bool:
        return bool(self.buffer)

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self.source.recv(CHUNK_BYTES)
            self.buffer += data
            self.source_ended = not data
        self.write()

    def write(self) -> None:
        if self.buffer:
            with contextlib.suppress(BlockingIOError):
                del self.buffer[: self.sink.send(self.buffer)]
        if self.source_ended and not self.buffer and not self.is_done:
            self.is_done = True
            self.sink.shutdown(socket.SHUT_WR)


class Connection:
    """A relayed connection. An end of one side becomes an end of the other, so that both see hang-ups as
    they are; a broken side breaks the other."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        inner: socket.socket,
        outer: socket.socket,
        on_end: Callable[[], None],
    ) -> None:
        self._selector = selector
        self._on_end = on_end
        self._is_over = False
        self._pipes = (Pipe(inner, outer), Pipe(outer, inner))
        self._masks = {inner: 0, outer: 0}
        for end in self._masks:
            end.setblocking(False)
        self._watch()

    def _ready(self, end: socket.socket, mask: int) -> None:
        # Its other end may have been ready in the same turn, and ended it.
        if self._is_over:
            return
        try:
            for pipe in self._pipes:
                if mask & selectors.EVENT_READ and pipe.source is end and pipe.wants_read:
                    pipe.read()
                if mask & selectors.EVENT_WRITE and pipe.sink is end:
                    pipe.write()
        except OSError:
            self._drop()
            return
        if all(pipe.is_done for pipe in self._pipes):
            self._drop()
        else:
            self._watch()

    def _watch(self) -> None:
        for reading, writing in (self._pipes, self._pipes[::-1]):
            end = reading.source
            mask = selectors.EVENT_READ * reading.wants_read | selectors.EVENT_WRITE * writing.wants_write
            before, self._masks[end] = self._masks[end], mask
            if before and not mask:
                self._selector.unregister(end)
            elif mask and not before:
                self._selector.register(end, mask, lambda ready, end=end: self._ready(end, ready))
            elif mask != before:
                self._selector.modify(end, mask, lambda ready, end=end: self._ready(end, ready))

    def _drop(self) -> None:
        for end, mask in self._masks.items():
            if mask:
                self._selector.unregister(end)
            end.close()
        self._is_over = True
        self._on_end()


class Relay:
    """Relays what connects to a port of the sandbox's loopback to the unix socket `path`. Connections beyond
    those that leave it files to look with wait for others to end."""

    def __init__(self, selector: selectors.BaseSelector, port: int, path: str) -> None:
        self._selector = selector
        self._path = path
        self._room = max(1, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OWN_FILES) // 2)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._listener.setblocking(False)
        self._accepts = False
        self.resume()

    def resume(self) -> None:
        if self._room and not self._accepts:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._accepts = True

    def _pause(self) -> None:
        self._selector.unregister(self._listener)
        self._accepts = False

    def _accept(self, mask: int) -> None:
        inner: socket.socket | None = None
        outer: socket.socket | None = None
        try:
            inner, _ = self._listener.accept()
            outer = socket.socket(socket.AF_UNIX)
            outer.connect(self._path)
            inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            for end in (inner, outer):
                if end is not None:
                    end.close()
            # The machine may be short of files: not at once again.
            if outer is None:
                self._pause()
            return
        self._room -= 1
        Connection(self._selector, inner, outer, self._ended)
        if not self._room:
            self._pause()

    def _ended(self) -> None:
        self._room += 1
        self.resume()


def spawn(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Starts the command with default signals. Raises OSError."""
    default = [signal.SIGPIPE, signal.SIGXFSZ]
    return os.posix_spawnp(command[0], list(command), dict(environment), setsigdef=default, setsid=True)


def kill_all(status_fd: int, told: str, why: str) -> int:
    """The command's exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    os.write(status_fd, f"{told}\nexit {KILLED}\n".encode())
    # Others have it too, and may have made it one that is written to only where there is room.
    with contextlib.suppress(OSError):
        os.write(2, f"all were killed: {why}\n".encode())
    return KILLED


def reap(pid: int) -> int | None:
    """The wait status of a process, where it has ended; all others that have are forgotten."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                found = ended[1]
    return found


def confine(limits: Mapping[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"],) * 2)
    # Where memory is short on the machine, sandboxes give way.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")
    # As a first process it is spared only the signals that it does not handle.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The command is of the same user: it must not take this process over.
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # But what it starts cannot hide itself.
    if (code := seccomp.open_to_looks()) is not None:
        filter_ = Filter(len(code) // seccomp.STEP_BYTES, code)
        libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0)


def run(
    status_fd: int,
    limits: Mapping[str, int],
    folders: Sequence[str],
    relayed: tuple[int, str],
    command: Sequence[str],
) -> int:
    """The command's exit code, or 128 + the signal that killed it."""
    os.set_inheritable(status_fd, False)
    confine(limits)
    selector = selectors.DefaultSelector()
    relay = Relay(selector, *relayed) if relayed[0] else None
    # Only the first process sees all others, and none but them.
    watch = Watch(limits, folders) if os.getpid() == 1 else None
    try:
        pid = spawn(command, os.environ)
    except (OSError, ValueError) as error:
        os.write(status_fd, f"failed {error}\n".encode())
        return 127
    os.write(status_fd, b"started\n")
    try:
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, None)
        code = attend(pid, selector, relay, watch)
    except Exception as error:
        # What runs inside may have a hand in it.
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return kill_all(status_fd, f"fault {why}", f"the sandbox's first process failed: {why}")
    if isinstance(code, str):
        return kill_all(status_fd, f"limit {code}", f"more than harness.limits.{code}")
    os.write(status_fd, f"exit {code}\n".encode() if code >= 0 else f"signal {-code}\n".encode())
    return code if code >= 0 else 128 - code


def attend(pid: int, selector: selectors.BaseSelector, relay: Relay | None, watch: Watch | None) -> int | str:
    """The command's exit code (negative: the signal that killed it), or the limit that was exceeded."""
    count_at = 0.0
    while (ended := reap(pid)) is None:
        if time.monotonic() >= count_at:
            if watch is not None and (why := watch.exceeded()) is not None:
                return why
            if relay is not None:
                relay.resume()
            count_at = time.monotonic() + WATCH_EVERY_S
        if watch is not None:
            watch.look()
        wait_s = 0.0 if watch is not None and watch.is_looking else WATCH_EVERY_S
        for key, mask in selector.select(wait_s):
            if key.data is not None:
                key.data(mask)
    return os.waitstatus_to_exitcode(ended)


def main(words: Sequence[str]) -> int:
    status_fd, limits, port, path, count, *rest = words
    values = dict(zip(FIELDS, map(int, limits.split(":")), strict=True))
    folders, command = rest[: int(count)], rest[int(count) :]
    return run(int(status_fd), values, folders, (int(port), path), command)
