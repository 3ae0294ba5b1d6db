from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.watch import TrackerError, open_tracker

from .statuses import event


def test_tensorboard_gets_the_figures_of_each_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = open_tracker("tensorboard", tmp_path, "tidy", {})
    sink(event("step", step=1, reward=0.25))
    sink(event("step", step=2, reward=0.5))
    sink(event("cell_up", cell=1))
    sink(event("eval", step=0, score=0.75))
    sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(s.step, s.value) for s in read.Scalars("train/reward")] == [(1, 0.25), (2, 0.5)]
    assert [(s.step, s.value) for s in read.Scalars("eval/score")] == [(0, 0.75)]


def test_trackio_gets_the_figures_and_leaves_stdout_alone(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = f"""
from pathlib import Path
from gyre.watch import open_tracker
sink = open_tracker("trackio", Path({str(tmp_path)!r}), "tidy", {{"train": {{"lr": 0.1}}}})
sink({event("step", step=1, reward=0.25)!r})
sink.close()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")},
        capture_output=True,
        check=True,
        timeout=50,
    )
    assert ran.stdout == b""
    with sqlite3.connect(tmp_path / "trackio" / "gyre.db") as db:
        ((step, metrics),) = db.execute("SELECT step, metrics FROM metrics").fetchall()
    assert step == 1
    assert json.loads(metrics)["train/reward"] == 0.25


def test_an_absent_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackerError, match=r"pip install 'gyre\[track\]'") as caught:
        open_tracker("wandb", tmp_path, "tidy", {})
    assert caught.value.tracker == "wandb"


def test_a_tracker_that_refuses_names_the_key(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").touch()
    with pytest.raises(TrackerError, match=r"watch\.tracker = 'tensorboard'"):
        open_tracker("tensorboard", tmp_path, "tidy", {})
