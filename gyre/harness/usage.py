"""What runs in a sandbox, looked at from inside by its first process. Standard library only: see bridge.py.

It is counted because a limit of the kernel's is one of a user, who has many sandboxes, and is none for root;
and because a cgroup is seldom ours to make.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import time
from collections.abc import Iterator, Mapping, Sequence

LOOK_EVERY_S = 0.5
# Looks that take long have at most this share of the time.
SHARE = 0.02
# But what could be written in between is never long unseen.
PAUSE_S = 5.0
# So many files are looked at before others have their turn.
SLICE = 200
PAGE_BYTES = resource.getpagesize()
# What cannot be looked into at so many looks in succession is beyond its limit. For a moment a program that
# starts is such.
UNSEEN_LOOKS = 3
# A folder that is closed again each time is not looked into.
OPENINGS = 10
# A path of at most so many parts, each of at most 4 bytes a character.
PART_CHARS = 1000
PARTS = 64
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
OVER = object()
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)


class Watch:
    """What runs in this sandbox, against its limits. Nobody is told of a fork, of memory or of a file."""

    def __init__(self, limits: Mapping[str, int], folders: Sequence[str]) -> None:
        self._limits = limits
        self._folders = folders
        self._devices = {os.stat(folder).st_dev for folder in folders}
        self._last = self._new = Look(folders, self._devices)
        self._unseen_looks = 0
        self._look: Iterator[None] | None = None
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
        elif self._last.disk_bytes > limits["disk_bytes"]:
            over = "disk_bytes"
        elif self._unseen_looks >= UNSEEN_LOOKS:
            over = self._last.unseen
        elif self._is_heavy(processes):
            over = "memory_bytes"
        else:
            return None
        return f"{over} = {limits[over]}"

    def _is_heavy(self, processes: Sequence[str]) -> bool:
        """Weighed exactly only where it may be so: to count shared memory more than once is cheaper."""
        left = self._limits["memory_bytes"] - self._last.held_bytes - shared_segments()
        now = time.monotonic()
        if sum(map(resident, processes)) <= left or now < self._weigh_at_s:
            return False
        is_heavy = sum(map(proportional, processes)) > left
        self._weigh_at_s = time.monotonic() + pause_s(time.monotonic() - now)
        return is_heavy

    def look(self) -> None:
        """A part of a look at the disk, when it is time for one."""
        began = time.monotonic()
        if self._look is None:
            if began < self._look_at_s:
                return
            self._new = Look(self._folders, self._devices)
            self._look = self._new.parts()
            self._look_took_s = 0.0
        is_over = next(self._look, OVER) is OVER
        now = time.monotonic()
        self._look_took_s += now - began
        if is_over:
            self._last = self._new
            self._unseen_looks = self._unseen_looks + 1 if self._last.unseen else 0
            self._look = None
            self._look_at_s = now + max(LOOK_EVERY_S, pause_s(self._look_took_s))


def pause_s(took_s: float) -> float:
    return min(took_s / SHARE, PAUSE_S)


class Look:
    """Bytes on disk below the folders, with files that have no name any more but are open; and bytes of open
    files without a name that are memory. `unseen` is the limit of what could not be looked into."""

    def __init__(self, folders: Sequence[str], devices: set[int]) -> None:
        self.disk_bytes = 0
        self.held_bytes = 0
        self.unseen = ""
        self._folders = folders
        self._devices = devices
        self._seen: set[tuple[int, int]] = set()

    def parts(self) -> Iterator[None]:
        """Looks, until nothing more comes."""
        for count, status in enumerate(self._below()):
            # One file may have many names.
            if status.st_nlink < 2 or stat.S_ISDIR(status.st_mode) or _is_new(status, self._seen):
                self.disk_bytes += status.st_blocks * 512
            if count % SLICE == SLICE - 1:
                yield
        for process in os.listdir("/proc"):
            if process[0] in "123456789":
                yield from self._open_files(process)

    def _below(self) -> Iterator[os.stat_result]:
        pending: list[tuple[str, ...]] = [(folder,) for folder in self._folders]
        opened: dict[tuple[str, ...], int] = {}
        while pending:
            folder = pending.pop()
            try:
                yield from _entries(folder, pending)
            except PermissionError:
                # Whose folder it is may always do this, and nothing is to be hidden.
                opened[folder] = opened.get(folder, 0) + 1
                if opened[folder] > OPENINGS:
                    self.unseen = "disk_bytes"
                elif _open_up(folder):
                    pending.append(folder)
            except OSError as error:
                if error.errno not in GONE:
                    self.unseen = "disk_bytes"

    def _open_files(self, process: str) -> Iterator[None]:
        """A thread may have files of its own, and the first may have ended before others."""
        for thread in _names(f"/proc/{process}/task"):
            folder = f"/proc/{process}/task/{thread}"
            try:
                for name in os.listdir(f"{folder}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        self._weigh(os.stat(f"{folder}/fd/{name}"))
            except (FileNotFoundError, ProcessLookupError):
                continue
            except OSError:
                # One that ends has no memory before it has no files.
                if any(_pages(folder)):
                    self.unseen = "memory_bytes"
            yield

    def _weigh(self, status: os.stat_result) -> None:
        if status.st_nlink or not stat.S_ISREG(status.st_mode) or not _is_new(status, self._seen):
            return
        if status.st_dev in self._devices:
            self.disk_bytes += status.st_blocks * 512
        else:
            self.held_bytes += status.st_blocks * 512


def _entries(folder: tuple[str, ...], pending: list[tuple[str, ...]]) -> Iterator[os.stat_result]:
    """Adds folders to those that are pending."""
    with _opened(folder) as fd, os.scandir(fd) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(_deeper(folder, entry.name))


def _deeper(folder: tuple[str, ...], name: str) -> tuple[str, ...]:
    """A path in parts, because the kernel takes none that is long."""
    *before, last = folder
    return (*before, f"{last}/{name}") if len(last) + len(name) < PART_CHARS else (*folder, name)


@contextlib.contextmanager
def _opened(folder: tuple[str, ...]) -> Iterator[int]:
    if len(folder) > PARTS:
        raise OSError(errno.ENAMETOOLONG, "too deep")
    fd = os.open(folder[0], FOLDER)
    try:
        for part in folder[1:]:
            fd, above = os.open(part, FOLDER, dir_fd=fd), fd
            os.close(above)
        yield fd
    finally:
        os.close(fd)


def _open_up(folder: tuple[str, ...]) -> bool:
    """Whether it could be."""
    *before, last = folder
    try:
        if not before:
            os.chmod(last, stat.S_IRWXU)
        else:
            with _opened(tuple(before)) as fd:
                os.chmod(last, stat.S_IRWXU, dir_fd=fd)
    except OSError:
        return False
    return True


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
    """Bytes, those that it shares included; 0 of one that is gone. Its first thread may have ended before the
    others, and has none then."""
    folder = f"/proc/{process}"
    pages = _pages(folder)[1]
    if not pages:
        threads = _names(f"{folder}/task")
        pages = max((_pages(f"{folder}/task/{thread}")[1] for thread in threads), default=0)
    return pages * PAGE_BYTES


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


def _pages(folder: str) -> tuple[int, int]:
    """All, and those in memory, of a process or a thread."""
    words = _text(f"{folder}/statm").split()
    return (int(words[0]), int(words[1])) if words else (0, 0)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
