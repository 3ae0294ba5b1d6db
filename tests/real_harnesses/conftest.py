"""Real harnesses, for `make test-harness`: GYRE_TEST_HARNESSES names the folder that they are installed in.
Without it nothing here runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real_harnesses.commands import FOLDER, HARNESSES, Harness
from tests.real_harnesses.tokenizer import write_large_tokenizer

if not FOLDER.is_dir():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(params=HARNESSES, ids=lambda harness: harness.name)
def harness(request: pytest.FixtureRequest) -> Harness:
    made: Harness = request.param
    return made
