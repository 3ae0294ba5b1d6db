"""The quickstart's tasks: an inbox of files that belong into folders by their extension."""

from __future__ import annotations

import random
from pathlib import Path

PROMPT = "tidy the inbox"
FOLDER_OF = {"csv": "data", "md": "docs", "png": "images", "py": "code"}
BOX_ITEMS = 1
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_names(rng: random.Random) -> tuple[list[str], list[str]]:
    """Names of the files in the inbox and of those in its box, all different. One inbox in four is long, so
    that executions of a step end at different times."""
    files = rng.choice((1, 1, 2, 5))
    stems = rng.sample([f"{letter}{digit}" for letter in LETTERS for digit in range(10)], files + BOX_ITEMS)
    names = [f"{stem}.{rng.choice(list(FOLDER_OF))}" for stem in stems]
    return sorted(names[:files]), sorted(names[files:])


def write_tasks(folder: Path, count: int, seed: int) -> None:
    """Writes `count` task folders below `folder`; the same seed writes the same tasks."""
    rng = random.Random(seed)
    for index in range(count):
        task = folder / f"task-{index:04d}"
        workspace = task / "workspace"
        box = workspace / "inbox" / "box"
        box.mkdir(parents=True)
        for name in set(FOLDER_OF.values()):
            (workspace / name).mkdir()
        files, boxed = draw_names(rng)
        for path in [*(box.parent / name for name in files), *(box / name for name in boxed)]:
            path.write_text(f"This is {path.name}.\n", encoding="utf-8")
        (task / "prompt.md").write_text(PROMPT + "\n", encoding="utf-8")
