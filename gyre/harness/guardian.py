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


def marked(mark: str) -> list[int]:
    """Processes, other than this one, whose environment at their start had a value of MARK that begins
    with `mark`. What cannot be read belongs to somebody else."""
    needle = b"\0" + f"{MARK}={mark}".encode()
    own = os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == own:
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb", buffering=0) as file:
            if needle in b"\0" + (file.read(1 << 20) or b""):
                found.append(int(entry))
    return found


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
