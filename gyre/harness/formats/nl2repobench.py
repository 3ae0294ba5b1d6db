"""NL2RepoBench: `start.md` is the specification of a package, `test_files.json` names the files of its
upstream test suite. The suite itself is in the benchmark's images; here it is a folder `upstream` beside."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from gyre.harness.formats.reading import read_json, read_text
from gyre.harness.task import Suite, Task, TasksError

MARKER = "start.md"
FILES = "test_files.json"
UPSTREAM = "upstream"


def load(folder: Path) -> Task:
    """Raises TasksError."""
    prompt = read_text(folder / MARKER, "write the specification there")
    path = folder / FILES
    names = read_json(path, list[str], "write the list of its test files there")
    if not names:
        raise TasksError(str(path), "names no file", "write the list of its test files there")
    for name in names:
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or not inside.parts or "\0" in name:
            raise TasksError(str(path), f"names {name!r}", "write paths inside the repository")
        if not _exists(folder / UPSTREAM / inside):
            fix = f"copy the upstream test suite, as {FILES} names it, into {UPSTREAM}"
            raise TasksError(str(folder), f"has no {UPSTREAM}/{inside}", fix)
    return Task(
        name=folder.name,
        folder=folder,
        prompt=prompt,
        format="nl2repobench",
        own=Suite(tests=UPSTREAM, overlay=tuple(names)),
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, a lone surrogate
        return False
