"""What holds for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import structlog
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

JOBS = "tests/run/"

# Before any test imports torch or numpy: many small processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Scheduling(LoadScopeScheduling):
    """Files stay together, since their tests share fixtures. Whole jobs are one: no two run at once."""

    def _split_scope(self, nodeid: str) -> str:
        return JOBS if nodeid.startswith(JOBS) else nodeid.partition("::")[0]


# What is imported stays, so that nothing is found in it, each time that a test collects garbage either.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The jobs, which take longest, begin first."""
    items.sort(key=lambda item: not item.nodeid.startswith(JOBS))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
