"""Copies and removal of workspaces: trees of files that anybody may have left behind, in any state."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gyre.harness.task import Part

MAX_ENTRIES = 500_000


class WorkspaceTooLarge(Exception):
    """A tree has more bytes or entries, or is deeper, than may be copied."""

    def __init__(self, path: Path, bytes_: int, max_bytes: int) -> None:
        super().__init__(
            f"{path} has more than {max_bytes} bytes or {MAX_ENTRIES} entries, or paths that are too long "
            f"(found {bytes_} bytes so far); raise harness.max_workspace_bytes where this is meant"
        )
        self.path = path
        self.bytes = bytes_
        self.max_bytes = max_bytes


def copy_tree(source: Path, target: Path, max_bytes: int) -> None:
    """Copies files, folders and those symbolic links that stay inside; sockets, pipes and devices are left
    out. `target` must not exist. Raises WorkspaceTooLarge, OSError."""
    left = _Budget(source, max_bytes)
    try:
        _copy(source, target, left)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise left.exceeded() from error
        raise


def _copy(source: Path, target: Path, left: _Budget) -> None:
    root = os.path.realpath(source)
    target.mkdir(parents=True)
    pending = [(source, target)]
    while pending:
        here, there = pending.pop()
        _make_readable(here)
        with os.scandir(here) as entries:
            for entry in entries:
                left.take(entry)
                if entry.is_symlink():
                    if _is_inside(root, entry.path):
                        os.symlink(os.readlink(entry.path), there / entry.name)
                elif entry.is_dir():
                    (there / entry.name).mkdir()
                    pending.append((Path(entry.path), there / entry.name))
                elif entry.is_file():
                    _copy_file(entry.path, there / entry.name)


def lay(parts: Sequence[Part], target: Path, max_bytes: int) -> None:
    """Makes a workspace of parts, later ones over earlier ones; each is bounded as by `copy_tree`. `target`
    must not exist. Raises WorkspaceTooLarge, OSError."""
    target.mkdir(parents=True)
    for part in parts:
        path = target / part.target
        if part.source is None:
            path.mkdir(parents=True, exist_ok=True)
        elif part.source.is_dir():
            staged = target.with_name(f"{target.name}-part")
            try:
                copy_tree(part.source, staged, max_bytes)
                shutil.copytree(staged, path, symlinks=True, dirs_exist_ok=True)
            finally:
                remove_tree(staged)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(part.source, path)


def remove_tree(path: Path) -> None:
    """Removes a tree, also one whose permissions forbid it. What cannot be removed stays."""
    try:
        shutil.rmtree(path, onerror=_retry_writable)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", path], check=False, stderr=subprocess.DEVNULL)


class _Budget:
    def __init__(self, source: Path, max_bytes: int) -> None:
        self._source = source
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries = 0

    def take(self, entry: os.DirEntry[str]) -> None:
        self._entries += 1
        self._bytes += entry.stat(follow_symlinks=False).st_size
        if self._bytes > self._max_bytes or self._entries > MAX_ENTRIES:
            raise self.exceeded()

    def exceeded(self) -> WorkspaceTooLarge:
        return WorkspaceTooLarge(self._source, self._bytes, self._max_bytes)


def _is_inside(root: str, link: str) -> bool:
    target = os.path.realpath(link)
    return target == root or target.startswith(root + os.sep)


def _copy_file(source: str, target: Path) -> None:
    try:
        shutil.copy2(source, target, follow_symlinks=False)
    except PermissionError:
        os.chmod(source, stat.S_IRUSR | stat.S_IWUSR)
        shutil.copy2(source, target, follow_symlinks=False)


def _make_readable(folder: Path) -> None:
    if not os.access(folder, os.R_OK | os.X_OK):
        folder.chmod(stat.S_IRWXU)


def _retry_writable(function: Callable[..., Any], path: str, _: Any) -> None:
    with contextlib.suppress(OSError):
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        if function in (os.open, os.scandir, os.rmdir):
            os.chmod(path, stat.S_IRWXU)
            shutil.rmtree(path, ignore_errors=True)
        else:
            function(path)
