"""Pages of KV in a folder in memory, which the servers of one host share.

A page is a file `vVERSION/KIND/KEY`: the weights it is of, the bytes' meaning (model, layout, rank), and the
hash that SGLang gives to its tokens and all before them. Nothing but the standard library and numpy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Page = NDArray[np.uint8]

MAGIC = b"gyre-kv1"
HEADER_BYTES = len(MAGIC) + 8
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:.-]{0,200}")
VERSION = re.compile(rb"(\d{1,19})\n")
# Each server sweeps when it has written LOOK_AFTER of the limit, down to KEEP of it: so many servers as fit
# between the two stay below it together.
KEEP = 3 / 4
LOOK_AFTER = 1 / 32
ABANDONED_S = 60.0


class Fence:
    """Of which weights a server's KV is: a version, or none while that changes. A page is moved only while
    the fence is held open, and the fence changes only while no page is moved, so that a page which goes in
    or out under a version is one that was computed under it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def held(self) -> Iterator[int | None]:
        """The version, which stays what it is within; None where no page may be moved."""
        try:
            # Its own opening, and so its own lock: threads of one process hold it apart.
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            fd = None
        if fd is None:
            yield None
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield parse_fence(os.pread(fd, 64, 0))
        finally:
            os.close(fd)

    def shut(self) -> None:
        """No page is moved from now on. Waits for the pages that are on their way."""
        self._set(b"")

    def open(self, version: int) -> None:
        """What the server has is of `version`, and nothing of another is left in it."""
        self._set(b"%d\n" % version)

    def _set(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, 0)
            os.pwrite(fd, content, 0)
        finally:
            os.close(fd)


def parse_fence(content: bytes) -> int | None:
    """What a fence's file says; None for anything but a version."""
    found = VERSION.fullmatch(content)
    return int(found[1]) if found else None


class Found(NamedTuple):
    used_ns: int
    nbytes: int
    path: str


class PageFolder:
    """Pages of `page_bytes`. Those that were not used for longest go when all are over `limit_bytes`."""

    def __init__(self, folder: Path, *, kind: str, page_bytes: int, limit_bytes: int) -> None:
        if not KEY.fullmatch(kind):
            raise ValueError(f"{kind!r} is no kind of page: it names a folder")
        self._folder = folder
        self._kind = kind
        self._page_bytes = page_bytes
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        # What others have left is not known yet.
        self._unswept_bytes = limit_bytes

    def has(self, version: int, key: str) -> bool:
        """Whether there is such a page, and it is whole."""
        try:
            found = os.stat(self._path(version, key))
        except OSError:
            return False
        return found.st_size == HEADER_BYTES + self._page_bytes

    def get(self, version: int, key: str, page: Page) -> bool:
        """Fills `page`. False, and anything in it, where there is none or its bytes are not those that were
        put."""
        header, beyond = bytearray(HEADER_BYTES), bytearray(1)
        try:
            fd = os.open(self._path(version, key), os.O_RDONLY)
        except OSError:
            return False
        try:
            # One call: after each this thread waits for its turn beside one that looks for work all the time.
            found = os.preadv(fd, [header, page.data, beyond], 0)
            os.utime(fd)
        except OSError:
            return False
        finally:
            os.close(fd)
        return found == HEADER_BYTES + self._page_bytes and header == _header(page)

    def put(self, version: int, key: str, page: Page) -> bool:
        """Whether it is there now: whole or not at all, whoever reads or writes it at the same time."""
        if page.nbytes != self._page_bytes:
            raise ValueError(f"a page has {page.nbytes} bytes: {self._page_bytes} are expected")
        path = self._path(version, key)
        if self.has(version, key):
            with contextlib.suppress(OSError):
                os.utime(path)
                return True
        written = f"{self._parent(version)}/.{os.getpid()}-{threading.get_ident()}"
        try:
            self._write(written, page)
            os.rename(written, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(written)
            return False
        self._account(HEADER_BYTES + self._page_bytes)
        return True

    def _write(self, path: str, page: Page) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, flags, 0o600)
        try:
            if os.writev(fd, [_header(page), page.data]) != HEADER_BYTES + self._page_bytes:
                raise OSError("no room")
        finally:
            os.close(fd)

    def sweep(self) -> None:
        """Removes what was not used for longest until KEEP of the limit is left, unless another does."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / ".sweep", "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            pages = sorted(self._scan())
            used_bytes = sum(page.nbytes for page in pages)
            for page in pages:
                if used_bytes <= KEEP * self._limit_bytes:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(page.path)
                used_bytes -= page.nbytes

    def _account(self, nbytes: int) -> None:
        with self._lock:
            self._unswept_bytes += nbytes
            if self._unswept_bytes < LOOK_AFTER * self._limit_bytes:
                return
            self._unswept_bytes = 0
        self.sweep()

    def _scan(self) -> Iterator[Found]:
        now_s = time.time()
        for folder, _, names in os.walk(self._folder):
            if folder == str(self._folder):
                continue
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(path)
                    if not name.startswith("."):
                        yield Found(found.st_mtime_ns, found.st_size, path)
                    elif found.st_mtime < now_s - ABANDONED_S:
                        os.unlink(path)

    def _parent(self, version: int) -> str:
        return f"{self._folder}/v{version}/{self._kind}"

    def _path(self, version: int, key: str) -> str:
        if not KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key of a page")
        return f"{self._parent(version)}/{key}"


def _header(page: Page) -> bytes:
    """A sum finds torn and zeroed pages, and costs a tenth of what a CRC does."""
    whole = page.nbytes // 8 * 8
    total = int(page[:whole].view(np.uint64).sum(dtype=np.uint64)) + int(page[whole:].sum(dtype=np.uint64))
    return MAGIC + (total % 2**64).to_bytes(8, "little")
