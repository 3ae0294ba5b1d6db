"""A folder for sockets and the like, in the system's for temporary files, which is gone with its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "gyre-harness-"
# Between its making and its locking a folder is nobody's.
YOUNG_S = 60.0


class OwnFolder:
    """It is locked as long as this process lives. Making one removes those that nobody holds any more."""

    def __init__(self, within: Path | None = None) -> None:
        root = within or Path(tempfile.gettempdir())
        for left in root.glob(f"{PREFIX}*"):
            _remove_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        self._descriptor = _open(self.path)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Blocking."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _remove_left(path: Path) -> None:
    # Gone, or another user's.
    with contextlib.suppress(OSError):
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime > YOUNG_S:
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
