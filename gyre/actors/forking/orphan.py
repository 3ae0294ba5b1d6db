"""How a process ended that is no child of this one, and has lost its parent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from pathlib import Path

# linux/pidfd.h: what a pidfd knows of a process that is gone, since Linux 6.15.
PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 1 << 3
INFO = struct.Struct("=Q52xi")  # mask, pids and ids, exit code
EXIT_CODE = -1  # the last field of /proc/PID/stat


def ended_with(pid: int, pidfd: int) -> int | None:
    """Its exit code, negative where it was a signal; None where the kernel does not say any more. It has
    ended: `pidfd` is readable."""
    status = _of_zombie(pid, pidfd)
    if status is None:
        status = _of_reaped(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _of_zombie(pid: int, pidfd: int) -> int | None:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        signal.pidfd_send_signal(pidfd, 0)  # not reaped yet, so this was not another's of that number
        return int(fields[EXIT_CODE])
    return None


def _of_reaped(pidfd: int) -> int | None:
    with contextlib.suppress(OSError):
        info = fcntl.ioctl(pidfd, PIDFD_GET_INFO, INFO.pack(PIDFD_INFO_EXIT, 0))
        mask, status = INFO.unpack(info)
        return int(status) if mask & PIDFD_INFO_EXIT else None
    return None
