"""A job file that is right, in a folder of its own, and a way to change it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.job import JobError, load_job

JOB = """\
[model]
recipe = "recipes.py:build"

[harness]
command = ["{python}", "{job_dir}/harness.py"]

[tasks]
path = "tasks"

[evaluator]
command = ["{python}", "{job_dir}/evaluate.py", "{workspace}"]
"""

Faults = Callable[..., dict[str, str]]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """The path of a job file without a fault."""
    (tmp_path / "tasks" / "first").mkdir(parents=True)
    (tmp_path / "tasks" / "first" / "prompt.md").write_text("Do it.")
    (tmp_path / "recipes.py").write_text("def build(folder): ...\ndef demos(): ...\n")
    path = tmp_path / "small.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def faults(job_file: Path) -> Faults:
    """Loads the job with overrides; its faults as text by key."""

    def of(*overrides: str) -> dict[str, str]:
        try:
            load_job(job_file, overrides)
        except JobError as error:
            found: dict[str, str] = {}
            for fault in error.faults:
                found[fault.key] = f"{found.get(fault.key, '')}{fault}\n"
            return found
        return {}

    return of
