"""One folder, one task: which format it has is told by the file that the format asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gyre.harness.formats import harbor, nl2repobench, terminal_bench
from gyre.harness.formats.reading import read_text
from gyre.harness.task import PROMPT, WORKSPACE, Part, Suite, Task, TasksError

TESTS = "tests"


def load_task(folder: Path) -> Task:
    """Raises TasksError."""
    found = [(name, load) for name, load in MARKERS.items() if (folder / name).exists()]
    if not found:
        others = ", ".join(name for name in MARKERS if name != PROMPT)
        fix = f"write the task's text there, or put one of {others} there for a task of another format"
        raise TasksError(str(folder), f"has no {PROMPT}", fix)
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise TasksError(str(folder), f"has {names}, which are of different formats", "keep one of them")
    return found[0][1](folder.absolute())


def _ours(folder: Path) -> Task:
    prompt = read_text(folder / PROMPT, "write the task's text there")
    workspace = folder / WORKSPACE
    return Task(
        name=folder.name,
        folder=folder,
        prompt=prompt,
        parts=(Part(workspace, ""),) if workspace.is_dir() else (),
        own=Suite(tests=TESTS) if (folder / TESTS).is_dir() else None,
    )


MARKERS: dict[str, Callable[[Path], Task]] = {
    PROMPT: _ours,
    harbor.MARKER: harbor.load,
    terminal_bench.MARKER: terminal_bench.load,
    nl2repobench.MARKER: nl2repobench.load,
}
"""The file that tells a format."""
