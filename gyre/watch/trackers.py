"""Trackers: each step's figures, also sent to TensorBoard, Weights & Biases or trackio."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gyre.watch.figures import figures
from gyre.watch.sinks import Event


class Tracker(Protocol):
    """Keeps figures over steps. `log` must not wait for a network."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Steps may come out of order: an evaluation ends when it ends."""

    def close(self) -> None:
        """Sends what is left."""


class TrackerError(RuntimeError):
    """The tracker that `watch.tracker` names cannot be used."""

    def __init__(self, tracker: str, reason: str) -> None:
        super().__init__(f"watch.tracker = {tracker!r}: {reason}")
        self.tracker = tracker
        self.reason = reason


class TrackerSink:
    """Hands the figures of events to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def __call__(self, event: Event) -> None:
        if (found := figures(event)) is not None:
            self._tracker.log(found.step, found.values)

    def close(self) -> None:
        # The last line of stdout is the summary; trackers like to talk there.
        with contextlib.redirect_stdout(sys.stderr):
            self._tracker.close()


class TensorBoard:
    """Event files in `run_dir`/tensorboard."""

    def __init__(self, run_dir: Path, job_name: str, config: Mapping[str, Any]) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer: Any = writer.EventFileWriter(str(run_dir / "tensorboard"), flush_secs=5)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summary(value=scalars)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run in the project `gyre`. Whether it goes online is WANDB_MODE's matter."""

    def __init__(self, run_dir: Path, job_name: str, config: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project="gyre", name=job_name, dir=str(run_dir), config=dict(config))
        # W&B's own step may not go back, and a late evaluation does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in the project `gyre`, in trackio's own folder (TRACKIO_DIR)."""

    def __init__(self, run_dir: Path, job_name: str, config: Mapping[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._run = self._trackio.init(
            project="gyre",
            name=job_name,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        # Not the run's own `finish`: trackio would finish it again at exit, and print.
        self._trackio.finish()


_TRACKERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def open_tracker(name: str, run_dir: Path, job_name: str, config: Mapping[str, Any]) -> TrackerSink:
    """The tracker that `watch.tracker` names; it may take seconds to open. `config` is the job as plain
    data. Raises TrackerError where its package is missing or it refuses."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return TrackerSink(_TRACKERS[name](run_dir, job_name, config))
    except ModuleNotFoundError as error:
        reason = f"the package {error.name} is not installed; pip install 'gyre[track]'"
        raise TrackerError(name, reason) from error
    except Exception as error:
        raise TrackerError(name, f"{type(error).__name__}: {error}") from error
