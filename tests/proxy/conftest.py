from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.proxy.codec import Codec
from tests.proxy.tokenizer_folders import SMOLLM2, write_tokenizer


@pytest.fixture(scope="session")
def chatml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its chat template shows tools."""
    return write_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its chat template knows no tools."""
    return write_tokenizer(tmp_path_factory.mktemp("smollm2"), SMOLLM2)


@pytest.fixture(scope="session")
def codec(chatml_folder: Path) -> Codec:
    return Codec(chatml_folder)


@pytest.fixture(scope="session")
def smollm2_codec(smollm2_folder: Path) -> Codec:
    return Codec(smollm2_folder)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as folder:
        yield Path(folder)
