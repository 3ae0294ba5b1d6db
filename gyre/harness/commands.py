"""Commands of a job file: their placeholders, their environment, the files that they name."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gyre.harness.sandbox import Mount

SEARCHED = (
    os.path.dirname(sys.executable),
    "/usr/local/bin",
    "/usr/bin",
    "/bin",
    "/usr/local/sbin",
    "/usr/sbin",
    "/sbin",
)

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def fill(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """The words with `{name}` replaced for the names in `values` and `{python}`; other braces stay."""
    known = {"python": sys.executable, **values}

    def value(match: re.Match[str]) -> str:
        return known.get(match[1], match[0])

    return tuple(_PLACEHOLDER.sub(value, word) for word in words)


def base_environment(home: str, temporary: str) -> dict[str, str]:
    """What any command gets: nothing of the job's own environment, where there may be secrets. Programs
    beside this Python are found first."""
    return {"PATH": ":".join(SEARCHED), "HOME": home, "TMPDIR": temporary, "LANG": "C.UTF-8"}


class ProgramMissing(Exception):
    """A job file's command cannot be started on this machine. `key` is its place in the file."""

    def __init__(self, key: str, program: str) -> None:
        where = "there is no such program" if "/" in program else f"it is in none of {', '.join(SEARCHED)}"
        super().__init__(f"{key}: cannot start {program!r}: {where}; install it or name its path")
        self.key = key
        self.program = program


def check_program(key: str, words: Sequence[str]) -> None:
    """Raises ProgramMissing where the command's program is not here. One that lies in the workspace, or is
    named by it, is not looked for."""
    program = fill(words[:1], {})[0]
    in_workspace = _PLACEHOLDER.search(program) or ("/" in program and not program.startswith("/"))
    if not in_workspace and shutil.which(program, path=":".join(SEARCHED)) is None:
        raise ProgramMissing(key, program)


def named_files(words: Iterable[str]) -> tuple[Mount, ...]:
    """Files that a command names by absolute path: it can use them in a sandbox, at the same path."""
    paths = dict.fromkeys(word for word in words if word.startswith("/") and os.path.isfile(word))
    return tuple(Mount(host=Path(path), inside=path) for path in paths)
