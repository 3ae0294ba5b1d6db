"""What a command prints: its beginning goes to a log file, its end is kept, what lies between is counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

CHUNK_BYTES = 65536
# Beyond the file's share a command is read slowly, so that one that prints without end costs nothing.
PAUSE_S = 0.02


HEAD_BYTES = 48 * 1024
TAIL_BYTES = 16 * 1024


class Output:
    """Bytes of one command, bounded: the first `head_bytes` are written to `log` as they come, the last
    `tail_bytes` are kept, and written by `close` where they are not in the log yet."""

    def __init__(
        self, log: Path | None = None, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES
    ) -> None:
        self._log = log.open("ab", buffering=0) if log is not None else None
        self._head_left = head_bytes if log is not None else 0
        self._tail_bytes = tail_bytes
        self._tail = bytearray()
        self._unlogged_bytes = 0

    @property
    def is_full(self) -> bool:
        """More of it only moves the tail."""
        return self._head_left == 0

    def feed(self, data: bytes) -> None:
        head = data[: self._head_left]
        self._write(head)
        self._head_left -= len(head)
        self._unlogged_bytes += len(data) - len(head)
        self._tail += data
        del self._tail[: -self._tail_bytes]

    def tail(self) -> str:
        """The end of what was printed."""
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        if self._log is None:
            return
        if (lost := self._unlogged_bytes - len(self._tail)) > 0:
            self._write(f"\n[{lost} bytes left out]\n".encode())
        if self._unlogged_bytes:
            self._write(bytes(self._tail[-self._unlogged_bytes :]))
        self._log.close()
        self._log = None

    def _write(self, data: bytes) -> None:
        # A full disk must not harm the execution: its log is the least of what is lost.
        with contextlib.suppress(OSError):
            if self._log is not None:
                self._log.write(data)


class OutputReader:
    """Reads a pipe into an Output on the running loop until its end or `close`."""

    def __init__(self, fd: int, output: Output) -> None:
        self._fd = fd
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def close(self) -> None:
        """Takes what is there (whoever wrote it is dead) and closes pipe and output."""
        if self._fd < 0:
            return
        self._stop()
        for _ in range(16):
            if not self._take():
                break
        os.close(self._fd)
        self._fd = -1
        self._output.close()

    def _read(self) -> None:
        if not self._take():
            self._stop()
        elif self._output.is_full:
            self._loop.remove_reader(self._fd)
            self._resume = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._fd, self._read)

    def _take(self) -> bool:
        """Whether there was something."""
        try:
            data = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._output.feed(data)
        return bool(data)

    def _stop(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._resume is not None:
            self._resume.cancel()
