from __future__ import annotations

import os
from pathlib import Path

from gyre.harness.own_folder import YOUNG_S, OwnFolder


def age(path: Path) -> None:
    then = path.stat().st_mtime - 2 * YOUNG_S
    os.utime(path, (then, then))


def test_what_nobody_holds_any_more_is_removed_when_another_is_made(tmp_path: Path) -> None:
    held, killed = OwnFolder(tmp_path), tmp_path / "gyre-harness-killed"
    just_made, other = tmp_path / "gyre-harness-young", tmp_path / "another"
    for folder in (killed, just_made, other):
        folder.mkdir()
    (killed / "proxy").mkdir()
    for folder in (held.path, killed, other):
        age(folder)
    made = OwnFolder(tmp_path)
    assert set(tmp_path.iterdir()) == {held.path, made.path, just_made, other}
    for folder in (held, made):
        folder.remove()
    assert set(tmp_path.iterdir()) == {just_made, other}
