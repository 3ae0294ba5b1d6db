from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cell.parts import write_policy


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with tied embeddings, and a tokenizer. Nobody changes it."""
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def even_policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with heads for two ranks."""
    return write_policy(tmp_path_factory.mktemp("even-policy"), heads=4, kv_heads=2)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder for regions that does not exist yet."""
    with tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as parent:
        yield Path(parent) / "regions"
