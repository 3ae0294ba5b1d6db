"""Scripts of tests, which find no network in a sandbox: those that want one are refused beforehand, because
they would say that nothing passed."""

from __future__ import annotations

import re
from pathlib import Path

from gyre.harness.formats.reading import read_text
from gyre.harness.task import TasksError

_FETCHES = re.compile(
    r"(?:^|[\s;&|(])(apt|apt-get|apk|yum|dnf|curl|wget|uv|uvx|pipx?3?|npm|npx|conda|git\s+clone|cargo\s+install"
    r"|python3?\s+-m\s+pip|docker|podman)(?=\s|$)"
)


def check_script(path: Path) -> None:
    """Raises TasksError."""
    text = read_text(path, "write the script of the task's tests there")
    for number, line in enumerate(text.splitlines(), 1):
        found = None if line.lstrip().startswith("#") else _FETCHES.search(line)
        if found is not None:
            raise TasksError(
                f"{path}, line {number}",
                f"wants {' '.join(found[1].split())}, but an evaluator has no network",
                "have it use what is installed, such as python3 -m pytest",
            )
