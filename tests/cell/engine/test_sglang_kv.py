"""What a server is told of the folder in which its KV is kept, and when KV may move there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from gyre.cell.config import SglangConfig
from gyre.cell.engine.base import EngineFault, Weights
from gyre.cell.engine.scripted import NoWeights
from gyre.cell.engine.sglang_kv import SITE, KvStorage
from gyre.cell.engine.sglang_launch import Served
from gyre.cell.engine.sglang_site.gyre_pages import Fence
from gyre.cell.engine.sglang_weights import Load, Thread


def served(folder: Path, ranks: int = 1) -> Served:
    return Served(
        model_folder=folder,
        dtype="bfloat16",
        window_tokens=100,
        kv_tokens=1024,
        block_tokens=16,
        max_batch=4,
        ranks=ranks,
    )


def version(folder: Path) -> int | None:
    with Fence(folder / "scratch" / "kv-version").held() as found:
        return found


@pytest.fixture
def storage(tmp_path: Path) -> KvStorage:
    return KvStorage(tmp_path / "pages", tmp_path / "scratch", 1000)


@pytest.fixture
def thread() -> Iterator[Thread]:
    made = Thread(torch.device("cpu"))
    yield made
    made.close()


def test_a_server_is_told_and_the_jobs_own_arguments_win(storage: KvStorage, tmp_path: Path) -> None:
    given = SglangConfig(arguments=("--hicache-ratio=3",), environment={"PYTHONPATH": "/shims", "A": "b"})
    config = storage.configured(given, served(tmp_path))
    assert config.environment == {"PYTHONPATH": f"{SITE}:/shims", "A": "b"}
    assert config.arguments[-1] == "--hicache-ratio=3"
    assert "--enable-hierarchical-cache" in config.arguments
    (extra,) = (a for a in config.arguments if a.startswith("--hicache-storage-backend-extra-config="))
    told = json.loads(extra.partition("=")[2])
    assert told["folder"] == str(tmp_path / "pages")
    assert told["limit_bytes"] == 1000
    assert told["prefetch_threshold"] == 64
    assert (Path(SITE) / f"{told['module_path']}.py").exists()


def test_a_new_server_has_nothing_of_the_one_before(storage: KvStorage, tmp_path: Path) -> None:
    Fence(tmp_path / "scratch" / "kv-version").open(7)
    storage.configured(SglangConfig(), served(tmp_path))
    assert version(tmp_path) is None


def test_a_server_of_many_ranks_keeps_nothing(storage: KvStorage, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_storage_bytes = 0"):
        storage.configured(SglangConfig(), served(tmp_path, ranks=2))


class During:
    """A way of weights on which `look` is called."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    @asynccontextmanager
    async def read(self, weights: Weights) -> AsyncIterator[Load]:
        async def load() -> None:
            self._look()

        yield load


async def test_no_page_moves_while_weights_come(storage: KvStorage, thread: Thread, tmp_path: Path) -> None:
    seen: list[int | None] = []
    delivery = storage.fenced(During(lambda: seen.append(version(tmp_path))), thread)
    for number in (1, 2):
        async with delivery.read(NoWeights(number)) as load:
            seen.append(version(tmp_path))
            await load()
            seen.append(version(tmp_path))
    assert seen == [None, None, 1, 1, None, 2]


async def test_after_weights_that_failed_no_page_moves(
    storage: KvStorage, thread: Thread, tmp_path: Path
) -> None:
    def fail() -> None:
        raise EngineFault("gone")

    Fence(tmp_path / "scratch" / "kv-version").open(1)
    with pytest.raises(EngineFault, match="gone"):
        async with storage.fenced(During(fail), thread).read(NoWeights(2)) as load:
            await load()
    assert version(tmp_path) is None
