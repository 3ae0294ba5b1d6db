"""The first program inside a bubblewrap sandbox: runs the command, and is its only way out.

A sandbox has a network of its own with nothing in it but a loopback. The bridge listens there and relays
bytes to the proxy's unix socket, which is mounted into the sandbox. Standard library only, few imports: it
starts once per execution, as `python -I -S bridge.py STATUS_FD FILE_BYTES PORT SOCKET COMMAND...`; port 0
relays nothing.

It kills all that runs in the sandbox when that becomes too much, which is an exit with code 137.

On STATUS_FD it says what happened to the command: `started`, then `exit CODE` or `signal NUMBER`; or
`failed REASON` where it could not be started.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

CHUNK_BYTES = 65536
BUFFER_BYTES = 1 << 20
# In a sandbox. They are counted because a limit of the kernel's is one of a user, who has many sandboxes, and
# is none for root.
MAX_PROCESSES = 1024
MAX_THREADS = 2048
COUNT_EVERY_S = 0.1
KILLED = 128 + signal.SIGKILL


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

    def __init__(self, selector: selectors.BaseSelector, inner: socket.socket, outer: socket.socket) -> None:
        self._selector = selector
        self._pipes = (Pipe(inner, outer), Pipe(outer, inner))
        self._masks = {inner: 0, outer: 0}
        for end in self._masks:
            end.setblocking(False)
        self._watch()

    def _ready(self, end: socket.socket, mask: int) -> None:
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
            self._masks[end] = 0


def listen(selector: selectors.BaseSelector, port: int, path: str) -> None:
    """Relays what connects to a port of the sandbox's loopback to the unix socket `path`."""
    listener = socket.create_server(("127.0.0.1", port), backlog=128)

    def accept(mask: int) -> None:
        inner, _ = listener.accept()
        outer = socket.socket(socket.AF_UNIX)
        try:
            outer.connect(path)
        except OSError:
            inner.close()
            outer.close()
            return
        inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Connection(selector, inner, outer)

    selector.register(listener, selectors.EVENT_READ, accept)


def spawn(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Starts the command with default signals. Raises OSError."""
    default = [signal.SIGPIPE, signal.SIGXFSZ]
    return os.posix_spawnp(command[0], list(command), dict(environment), setsigdef=default, setsid=True)


def too_many() -> str | None:
    """What there are too many of. It must be quick: among thousands that want to run, its turn is short."""
    processes = [entry for entry in os.listdir("/proc") if entry[0] in "123456789"]
    if len(processes) > MAX_PROCESSES:
        return f"{MAX_PROCESSES} processes"
    threads = 0
    for process in processes:
        with contextlib.suppress(OSError):
            threads += os.stat(f"/proc/{process}/task").st_nlink - 2
    return f"{MAX_THREADS} threads" if threads > MAX_THREADS else None


def kill_all(status_fd: int, why: str) -> int:
    """The command's exit code."""
    os.kill(-1, signal.SIGKILL)
    os.write(2, f"all were killed: {why}\n".encode())
    os.write(status_fd, f"exit {KILLED}\n".encode())
    return KILLED


def run(status_fd: int, file_bytes: int, port: int, path: str, command: Sequence[str]) -> int:
    """The command's exit code, or 128 + the signal that killed it."""
    os.set_inheritable(status_fd, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    selector = selectors.DefaultSelector()
    if port:
        listen(selector, port, path)
    try:
        pid = spawn(command, os.environ)
    except (OSError, ValueError) as error:
        os.write(status_fd, f"failed {error}\n".encode())
        return 127
    os.write(status_fd, b"started\n")
    process = os.pidfd_open(pid)
    selector.register(process, selectors.EVENT_READ, None)
    count_at = time.monotonic()
    while True:
        # Nobody is told of a fork.
        if time.monotonic() >= count_at:
            if (found := too_many()) is not None:
                return kill_all(status_fd, f"there were more than {found}")
            count_at = time.monotonic() + COUNT_EVERY_S
        for key, mask in selector.select(max(0.0, count_at - time.monotonic())):
            if key.data is not None:
                key.data(mask)
                continue
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(status_fd, f"exit {code}\n".encode() if code >= 0 else f"signal {-code}\n".encode())
            return code if code >= 0 else 128 - code


def main(words: Sequence[str]) -> int:
    status_fd, file_bytes, port, path, *command = words
    return run(int(status_fd), int(file_bytes), int(port), path, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
