"""Connections of this process, or of one that it may look into, that break as if a cable were cut."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438


def sever(pid: int, where: str) -> int:
    """Breaks the connections of a process to addresses that contain `where`; answers how many."""
    assert where
    severed = 0
    with open_process(pid) as process:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(entry).startswith("socket:"):
                    severed += _sever(process, int(entry.name), where)
    return severed


class open_process:
    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __enter__(self) -> int:
        self._file = os.pidfd_open(self._pid)
        return self._file

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def _sever(process: int, descriptor: int, where: str) -> bool:
    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    with socket.socket(fileno=copy) as found:
        if found.type != socket.SOCK_STREAM or where not in str(_peer(found)):
            return False
        found.shutdown(socket.SHUT_RDWR)
        return True


def _peer(found: socket.socket) -> object:
    try:
        return found.getpeername()
    except OSError:
        return ""
