"""The file whose content the nodes of a job prove to each other that they hold."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

SHORTEST = 32
LONGEST = 4096


class TokenError(Exception):
    """The token file at `path` cannot be used; the message says what to do."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"token file {path}: {problem}")
        self.path = path
        self.problem = problem


def read_token(path: Path) -> bytes:
    """Its content without white space at the ends. Raises TokenError, also where others may read it."""
    try:
        # A pipe would be waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise TokenError(path, "is no regular file")
            if status.st_mode & 0o077:
                raise TokenError(path, f"others may read it: chmod 600 {path}")
            token = file.read(LONGEST + 1).strip()
    except OSError as error:
        raise TokenError(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a path with a NUL
        raise TokenError(path, str(error)) from error
    if not SHORTEST <= len(token) <= LONGEST:
        raise TokenError(path, f"has {len(token)} characters; {SHORTEST} to {LONGEST} are allowed")
    return token


def make_token(path: Path) -> bytes:
    """What is there, or a new one that only this user may read. Raises TokenError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise TokenError(path, f"cannot be written: {error.strerror or error}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(32)}\n")
    return read_token(path)
