"""What holds for every test."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from gyre.actors.forking.keeper import start_fork_server
from gyre.actors.forking.messages import FORK_SERVER
from gyre.cell.ranks import RANK_MODULES, rank_environment

JOBS = "tests/run/"

# Before any test imports torch or numpy: many small processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# How long an example takes, and how long it takes to draw some, says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


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


def pytest_configure(config: pytest.Config) -> None:
    """One fork server for the ranks of all tests, whichever process runs them. It imports torch when the
    first of them starts."""
    if FORK_SERVER in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="gyre-tests-fork-"))
    server = start_fork_server(
        folder / "socket", RANK_MODULES, rank_environment(threads=1), subprocess.DEVNULL, lazy=True
    )
    os.environ[FORK_SERVER] = str(folder / "socket")

    def end() -> None:
        del os.environ[FORK_SERVER]
        server.kill()
        server.wait()
        shutil.rmtree(folder)

    config.add_cleanup(end)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The jobs, which take longest, begin first."""
    items.sort(key=lambda item: not item.nodeid.startswith(JOBS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was raised where nobody could catch it, last and in full: it may be an earlier test's."""
    stats = terminalreporter.stats
    for report in (*stats.get("failed", ()), *stats.get("error", ())):
        if "PytestUnraisableExceptionWarning" in (text := report.longreprtext):
            terminalreporter.section(f"unraisable in {report.nodeid}")
            for line in text.splitlines():
                if line.startswith(("E ", "Exception ignored")):
                    terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
