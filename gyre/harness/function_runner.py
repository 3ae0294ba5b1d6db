"""Calls an evaluator that is a function, as `python function_runner.py FUNCTION WORKSPACE TASK`, and prints
the score that it returns. Standard library only: it is a script in a sandbox.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(words: Sequence[str]) -> None:
    name, workspace, task = words
    place, _, function = name.rpartition(":")
    # Its own prints are no scores.
    answer = os.dup(1)
    os.dup2(2, 1)
    # This file's folder and the workspace are no places to import from.
    sys.path[0:1] = [str(Path(place).parent)] if place.endswith(".py") else []
    module = importlib.import_module(Path(place).stem if place.endswith(".py") else place)
    score = getattr(module, function)(Path(workspace), Path(task))
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        raise TypeError(f"{name} returned {score!r}, which is no number")
    os.write(answer, f"{float(score)!r}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
