"""Keeps a server and all that it starts, so that nothing outlives its cell.

As a script (`python -I -S sglang_keeper.py COMMAND ...`) it starts the command in a session of its own and
waits. Any byte on standard input asks it to terminate; when standard input closes, which is when the cell's
process ends in whatever way, or when the command ends, all that is left of it is killed and reaped. Its exit
code is the command's, 128 + N where that died of signal N.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _children(process: int) -> list[int]:
    """Of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found.extend(int(child) for child in file.read().split())
    return found


def _kill_descendants() -> None:
    look_at = _children(os.getpid())
    while look_at:
        process = look_at.pop()
        look_at.extend(_children(process))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _reap_all() -> None:
    """Kills and reaps until no descendant is left; orphans of the command become our children."""
    while True:
        _kill_descendants()
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def before_exec() -> None:
        # Its parent is this keeper, which may itself be killed.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    command = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=before_exec
    )
    ended = os.pidfd_open(command.pid)
    while True:
        ready, _, _ = select.select([ended, sys.stdin.fileno()], [], [])
        if ended in ready or not os.read(sys.stdin.fileno(), 4096):
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGTERM)
    if command.poll() is None:
        command.kill()
    code = command.wait()
    _reap_all()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
