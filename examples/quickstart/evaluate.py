"""The quickstart's evaluator: which fraction of a workspace's files lies in the folder of its extension."""

from __future__ import annotations

import os
import sys

FOLDER_OF = {"csv": "data", "md": "docs", "png": "images", "py": "code"}


def score(workspace: str) -> float:
    """Files in their right folder / files."""
    total = right = 0
    for folder, _, names in os.walk(workspace):
        where = os.path.relpath(folder, workspace)
        total += len(names)
        right += sum(FOLDER_OF.get(name.rpartition(".")[2]) == where for name in names)
    return right / total if total else 0.0


if __name__ == "__main__":
    print(score(sys.argv[1]))
