"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog

# Before any test imports torch or numpy: many small processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# Whole jobs: they share one warm-started policy, and no two run at once.
JOBS = ("tests/run/",)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For pytest-xdist: a file's tests, which share fixtures, stay together; the jobs, which take longest,
    begin first."""
    for item in items:
        path = item.path.relative_to(item.config.rootpath).as_posix()
        item.add_marker(pytest.mark.xdist_group("jobs" if path.startswith(JOBS) else path))
    items.sort(key=lambda item: "jobs" not in {mark.args[0] for mark in item.iter_markers("xdist_group")})


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
