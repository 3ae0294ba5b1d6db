"""The sandboxes that there are."""

from __future__ import annotations

from pathlib import Path

from gyre.harness.bubblewrap import Bubblewrap
from gyre.harness.sandbox import ProcessSandbox, Sandbox


def sandboxes_by_name(folder: Path) -> dict[str, Sandbox]:
    """As a job file names them; `folder` is for files of theirs. None has been checked."""
    return {"process": ProcessSandbox(), "bubblewrap": Bubblewrap(folder)}
