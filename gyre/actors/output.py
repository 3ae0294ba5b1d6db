"""What a child process prints: into its log, or its last lines kept."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

TAIL_LINES = 20
TAIL_BYTES = 8192


class Output:
    """Where the child's stdout and stderr go. `fd` is for the child; call `started` when it has it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log_path: Path | None) -> None:
        self._loop = loop
        self._path = log_path
        self._tail = b""
        self._reader = -1
        if log_path is None:
            self._reader, self.fd = os.pipe()
            os.set_blocking(self._reader, False)
        else:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._start = 0 if log_path is None else os.fstat(self.fd).st_size

    def started(self) -> None:
        os.close(self.fd)
        self.fd = -1
        if self._reader >= 0:
            self._loop.add_reader(self._reader, self._read)

    def close(self) -> tuple[str, ...]:
        """The last lines; the child is gone."""
        if self.fd >= 0:
            os.close(self.fd)
        if self._reader >= 0:
            while self._read():
                pass
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1
        elif self._path is not None:
            self._tail = self._read_log(self._path)
        lines = self._tail.decode(errors="replace").splitlines()
        return tuple(line.rstrip() for line in lines if line.strip())[-TAIL_LINES:]

    def _read(self) -> bool:
        """Whether there may be more."""
        try:
            chunk = os.read(self._reader, 65536)
        except BlockingIOError:
            return False
        self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        if not chunk:
            self._loop.remove_reader(self._reader)
        return bool(chunk)

    def _read_log(self, path: Path) -> bytes:
        try:
            with path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._start, end - TAIL_BYTES))
                return log.read()
        except OSError:
            return b""
