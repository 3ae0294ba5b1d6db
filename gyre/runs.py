"""The folder of a run: `job.toml`, journal, events, checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path


class RunFolderError(Exception):
    """The run's folder cannot be used; `folder` says which, the message what to do."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"{folder}: {problem}")
        self.folder = folder


def prepare_run_folder(folder: Path, job_toml: str, *, resume: bool) -> None:
    """Makes it and writes the resolved job into it. What an earlier run of that name left is moved aside,
    unless it is to be resumed. Raises RunFolderError."""
    journal = folder / "journal.db"
    if resume and not journal.exists():
        raise RunFolderError(folder, "there is no run to resume: leave --resume away to start one")
    if resume and journal.stat().st_size == 0:
        fix = "restore it from a copy, or leave --resume away to start anew"
        raise RunFolderError(folder, f"journal.db is empty, there is nothing to resume: {fix}")
    try:
        if journal.exists() or (folder / "checkpoints").exists():
            with _unused(folder):
                if not resume:
                    folder.rename(folder.with_name(f"{folder.name}.{datetime.now():%Y%m%d-%H%M%S.%f}"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.toml").write_text(job_toml, encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error}): make room or set run_dir to another folder"
        raise RunFolderError(folder, problem) from error


@contextmanager
def _unused(folder: Path) -> Iterator[None]:
    """The journal's lock is held: nothing is changed under the feet of a job that lives."""
    descriptor = os.open(folder / "journal.db.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise RunFolderError(folder, "another job runs there: set name or run_dir to another") from error
    finally:
        os.close(descriptor)
