"""What of a Python and its packages a sandbox is given: its folder may be somebody's home, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# `ssl` is of conda.
PARTS = ("pyvenv.cfg", "bin", "include", "lib", "lib64", "ssl")


def is_environment(folder: Path) -> bool:
    """Whether a Python that is in its `bin` finds its packages, or itself, there: by the files that it looks
    for."""
    return (folder / "pyvenv.cfg").exists() or any(folder.glob("lib/python3*/os.py"))


def parts_of(folder: Path) -> Iterator[Path]:
    for part in PARTS:
        if (folder / part).exists():
            yield folder / part
