"""Kills what a harness leaves, by a mark in its environment: also what left its process group, and also
when the job's own process is gone.

As a script (`python -I -S guardian.py MARK`) it waits until its standard input closes, which is when the job
ends in whatever way, and kills every process that carries the mark.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

MARK = "GYRE_GUARD"
PASSES = 100
# At a process whose environment is empty: a kernel thread and a zombie have no program either. Where others
# want to run too, an exec may take a while.
LOOKS = 7


def marked(mark: str) -> list[int]:
    """Processes, other than this one, whose environment at their start had a value of MARK that begins
    with `mark`. What cannot be read belongs to somebody else."""
    needle = b"\0" + f"{MARK}={mark}".encode()
    own = os.getpid()
    found: list[int] = []
    look_at = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and int(entry) != own]
    for look in range(LOOKS):
        blank = []
        for process in look_at:
            with contextlib.suppress(OSError):
                environment = _environment(process)
                if needle in b"\0" + environment:
                    found.append(process)
                elif not environment and os.readlink(f"/proc/{process}/exe"):
                    blank.append(process)
        if not blank:
            break
        look_at = blank  # in the midst of an exec, or it was given none
        time.sleep(0.001 * 2**look)
    return found


def _environment(process: int) -> bytes:
    with open(f"/proc/{process}/environ", "rb", buffering=0) as file:
        return file.read(1 << 20) or b""


def kill_marked(mark: str) -> int:
    """Kills until none is left, because a process may fork while it is looked for. Answers how many."""
    killed: set[int] = set()
    for _ in range(PASSES):
        found = marked(mark)
        if not found:
            break
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if killed.issuperset(found):
            time.sleep(0.005)
        killed.update(found)
    return len(killed)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    kill_marked(sys.argv[1])


if __name__ == "__main__":
    main()
