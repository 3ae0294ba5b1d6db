"""What runs in a sandbox, looked at from inside by its first process. Standard library only: see bridge.py.

It is counted because a limit of the kernel's is one of a user, who has many sandboxes, and is none for root;
and because a cgroup is seldom ours to make.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import time
from collections.abc import Iterator, Mapping, Sequence

LOOK_EVERY_S = 0.5
# Looks that take long have at most this share of the time.
SHARE = 0.02
# So many files are looked at before others have their turn.
SLICE = 200
PAGE_BYTES = resource.getpagesize()


class Watch:
    """What runs in this sandbox, against its limits. Nobody is told of a fork, of memory or of a file."""

    def __init__(self, limits: Mapping[str, int], folders: Sequence[str]) -> None:
        self._limits = limits
        self._folders = folders
        self._devices = {os.stat(folder).st_dev for folder in folders}
        self._disk_bytes = 0
        self._held_bytes = 0
        self._look: Iterator[tuple[int, int] | None] | None = None
        self._look_at_s = 0.0
        self._look_took_s = 0.0
        self._weigh_at_s = 0.0

    @property
    def is_looking(self) -> bool:
        return self._look is not None

    def exceeded(self) -> str | None:
        """A limit, as `name = value`. It must be quick: among thousands that want to run, its turn is
        short."""
        processes = [entry for entry in os.listdir("/proc") if entry[0] in "123456789"]
        limits = self._limits
        if len(processes) > limits["processes"]:
            over = "processes"
        elif threads_of(processes) > limits["threads"]:
            over = "threads"
        elif self._disk_bytes > limits["disk_bytes"]:
            over = "disk_bytes"
        elif self._is_heavy(processes):
            over = "memory_bytes"
        else:
            return None
        return f"{over} = {limits[over]}"

    def _is_heavy(self, processes: Sequence[str]) -> bool:
        """Weighed exactly only where it may be so: to count shared memory more than once is cheaper."""
        left = self._limits["memory_bytes"] - self._held_bytes - shared_segments()
        now = time.monotonic()
        if sum(map(resident, processes)) <= left or now < self._weigh_at_s:
            return False
        is_heavy = sum(map(proportional, processes)) > left
        self._weigh_at_s = time.monotonic() + (time.monotonic() - now) / SHARE
        return is_heavy

    def look(self) -> None:
        """A part of a look at the disk, when it is time for one."""
        began = time.monotonic()
        if self._look is None:
            if began < self._look_at_s:
                return
            self._look = usage(self._folders, self._devices)
            self._look_took_s = 0.0
        found = next(self._look)
        now = time.monotonic()
        self._look_took_s += now - began
        if found is not None:
            self._disk_bytes, self._held_bytes = found
            self._look = None
            self._look_at_s = now + max(LOOK_EVERY_S, self._look_took_s / SHARE)


def usage(folders: Sequence[str], devices: set[int]) -> Iterator[tuple[int, int] | None]:
    """Bytes on disk below the folders, with files that have no name any more but are open; and bytes of
    open files without a name that are memory. Says None now and then before, to be gone on with."""
    seen: set[tuple[int, int]] = set()
    disk = held = 0
    for count, status in enumerate(_below(list(folders))):
        # One file may have many names.
        if status.st_nlink < 2 or stat.S_ISDIR(status.st_mode) or _is_new(status, seen):
            disk += status.st_blocks * 512
        if count % SLICE == SLICE - 1:
            yield None
    for process in os.listdir("/proc"):
        if process[0] in "123456789":
            for status in _open_files(process):
                if status.st_nlink == 0 and stat.S_ISREG(status.st_mode) and _is_new(status, seen):
                    if status.st_dev in devices:
                        disk += status.st_blocks * 512
                    else:
                        held += status.st_blocks * 512
            yield None
    yield disk, held


def _below(pending: list[str]) -> Iterator[os.stat_result]:
    opened = set()
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        yield entry.stat(follow_symlinks=False)
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
        except PermissionError:
            # Whose folder it is may always do this, and nothing is to be hidden.
            if folder not in opened:
                opened.add(folder)
                with contextlib.suppress(OSError):
                    os.chmod(folder, stat.S_IRWXU)
                    pending.append(folder)
        except OSError:
            continue


def _open_files(process: str) -> Iterator[os.stat_result]:
    folder = f"/proc/{process}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                yield os.stat(f"{folder}/{name}")


def _is_new(status: os.stat_result, seen: set[tuple[int, int]]) -> bool:
    key = (status.st_dev, status.st_ino)
    is_new = key not in seen
    seen.add(key)
    return is_new


def threads_of(processes: Sequence[str]) -> int:
    threads = 0
    for process in processes:
        with contextlib.suppress(OSError):
            threads += os.stat(f"/proc/{process}/task").st_nlink - 2
    return threads


def resident(process: str) -> int:
    """Bytes, those that it shares included; 0 of one that is gone."""
    return int((_text(f"/proc/{process}/statm").split() or "00")[1]) * PAGE_BYTES


def proportional(process: str) -> int:
    """Bytes, its part of what it shares; all of it where that is not told."""
    for line in _text(f"/proc/{process}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return resident(process)


def shared_segments() -> int:
    """Bytes of System V shared memory, which no process need have mapped."""
    lines = _text("/proc/sysvipc/shm").splitlines()
    at = lines[0].split().index("rss") if lines else 0
    return sum(int(line.split()[at]) for line in lines[1:])


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
