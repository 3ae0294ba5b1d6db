"""Tasks: where they come from, and in which order they are drawn."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from gyre.cell.recipes import FAULTS, load_function
from gyre.harness.formats import load_task
from gyre.harness.task import PROMPT, Task, TasksError

__all__ = ["Task", "TaskOrder", "TasksError", "load_bundled", "load_tasks", "write_recipe"]

# Tasks that come with Gyre.
BUNDLED = Path(__file__).with_name("bundled")
ALL = "all"


def load_tasks(folder: Path) -> tuple[Task, ...]:
    """All tasks below `folder`, by name; folders whose name begins with a dot are none. Raises TasksError."""
    try:
        folders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise TasksError(
            str(folder), f"cannot be read ({error.strerror})", "name a folder of tasks"
        ) from error
    if not folders:
        raise TasksError(str(folder), "has no task in it", f"put one folder a task there, each with {PROMPT}")
    return tuple(load_task(path) for path in folders)


def load_bundled(names: Sequence[str]) -> tuple[Task, ...]:
    """Raises TasksError."""
    if not names:
        return ()
    tasks = {task.name: task for task in load_tasks(BUNDLED)}
    chosen = dict.fromkeys(name for given in names for name in (tasks if given == ALL else [given]))
    if unknown := [name for name in chosen if name not in tasks]:
        fix = f"name some of {', '.join(tasks)}, or {ALL}"
        raise TasksError("the tasks that come with gyre", f"there is none named {unknown[0]!r}", fix)
    return tuple(tasks[name] for name in chosen)


def write_recipe(recipe: str, folder: Path, count: int, seed: int) -> None:
    """Has a recipe, a function `(folder, count, seed)` named `file.py:function` or
    `package.module:function`, write its tasks into `folder`; not again where it already did. Raises
    TasksError, RecipeError."""
    if folder.is_dir():
        return
    write = load_function(recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}-draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        write(draft, count, seed)
    except FAULTS as error:
        fix = "it is called with (folder, count, seed) and writes one folder a task"
        raise TasksError(recipe, f"raised {type(error).__name__}: {error}", fix) from error
    draft.rename(folder)


class TaskOrder:
    """An endless order: each pass over the tasks is shuffled anew. A pure function of the seed and the
    number of the draw, so that a resumed job goes on as if it had not stopped."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tuple(tasks)
        self._seed = seed

    def task(self, number: int) -> Task:
        one_pass, position = divmod(number, len(self._tasks))
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}/{one_pass}").shuffle(order)
        return self._tasks[order[position]]
