"""A real SGLang server on a CPU, for `make test-sglang`: GYRE_SGLANG_PYTHON names the interpreter of the
environment that it is in. Without it nothing here runs. On a GPU: GYRE_TEST_DEVICE=cuda, and where needed
GYRE_SGLANG_PATH as its PYTHONPATH and GYRE_SGLANG_ARGUMENTS as further flags."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.cell.config import SglangConfig
from gyre.cell.engine.sglang import SglangEngine
from gyre.cell.engine.sglang_launch import Served
from gyre.cell.engine.sglang_server import SglangServer
from tests.cell.engine import calls
from tests.cell.engine.calls import VOCAB
from tests.cell.engine.conftest import (
    DEVICE,
    NativeCase,
    one_thread,
    skip_what_it_lacks,
    tiny_model,
)

__all__ = ["one_thread"]

PYTHON = os.environ.get("GYRE_SGLANG_PYTHON")
PATH = os.environ.get("GYRE_SGLANG_PATH", str(Path(__file__).parent / "shims"))
ARGUMENTS = tuple(os.environ.get("GYRE_SGLANG_ARGUMENTS", "").split())
START_TIMEOUT_S = 600.0
# Each takes 2.3 GB.
SERVERS = 2
# Of every server; an engine's own may be smaller.
WINDOW_TOKENS = 500

if PYTHON is not None:
    calls.PAUSE_S = 0.002

if PYTHON is None:
    collect_ignore_glob = ["test_*.py"]
elif DEVICE.type != "cuda":
    collect_ignore = ["test_gpus.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A start takes most of a minute on an idle machine, several on a busy one."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


def sglang_config(**options: Any) -> SglangConfig:
    defaults: dict[str, Any] = {
        "python": Path(PYTHON or "python"),
        # It admits calls before it knows that their KV has room, and retracts some again.
        "arguments": ("--enable-deterministic-inference", "--schedule-conservativeness=0.01", *ARGUMENTS),
        # On a GPU its products in float32 would have the 10 bits of TF32.
        "environment": {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "TRITON_F32_DEFAULT": "ieee"},
        "start_timeout_s": START_TIMEOUT_S,
        # Several on one GPU; on a CPU it is of what is free, and `kv_tokens` is far less.
        "mem_fraction_static": 0.05 if DEVICE.type == "cuda" else 0.5,
    }
    return SglangConfig(**(defaults | options))


class Pool:
    """Servers that outlive a test, on a loop of their own: one for each kind that is asked for, at most
    SERVERS; the one that was asked for least often goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers: dict[Served, SglangServer] = {}
        self._asked: Counter[Served] = Counter()

    def url(self, served: Served) -> str:
        self._asked[served] += 1
        server = self._servers.get(served)
        if server is not None and server.ended.done():
            self._run(self._servers.pop(served).stop())
            server = None
        if server is None:
            while len(self._servers) >= SERVERS:
                seldom = min(self._servers, key=lambda known: self._asked[known])
                self._run(self._servers.pop(seldom).stop())
            server = self._servers[served] = self._run(self._start(served))
        return server.client.url.replace("http://", f"http://:{server.key}@")

    def keeper(self, served: Served) -> int:
        return self._servers[served].pid

    def folder(self, name: str) -> Path:
        return self._folder / name

    def model_folder(self, kind: str) -> Path:
        folder = self.folder(kind)
        if not folder.exists():
            tiny_model(kind, 12345).save_pretrained(folder)
        return folder

    def close(self) -> None:
        for server in self._servers.values():
            self._run(server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self, served: Served) -> SglangServer:
        server = SglangServer(served, sglang_config(), self._folder / "server.log")
        await server.start()
        return server

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    made = Pool(tmp_path_factory.mktemp("sglang"))
    yield made
    made.close()


class SglangCase(NativeCase):
    """SglangEngine at a server of the pool, compared with transformers. Engines of a test that are alike
    share a server, which no test minds as long as only one of them works."""

    lacks: Mapping[str, str] = {
        "kv": "stock SGLang gives no KV away and takes none; whoever wanted it computes it again",
    }

    def __init__(self, kind: str, shm: Path, pool: Pool, *, own: bool = False, **config: Any) -> None:
        super().__init__(kind, shm / "regions")
        self._pool = pool
        self._shm = shm
        self._own = own
        self._config = config
        self._made: list[SglangEngine] = []

    def served(self, **options: Any) -> Served:
        """What a server must be started with for an engine of these options."""
        defaults: dict[str, Any] = {
            "model_folder": self._pool.model_folder(self._kind),
            "dtype": "float32",
            "kv_tokens": 4096,
            "block_tokens": 8,
            "max_batch": 16,
            "device": DEVICE.type,
        }
        known = {name: options[name] for name in options if name in Served.__struct_fields__}
        return Served(**(defaults | known | {"window_tokens": WINDOW_TOKENS}))

    def engine(self, **options: Any) -> SglangEngine:  # type: ignore[override]
        served = self.served(**options)
        engine = SglangEngine(
            msgspec.structs.replace(served, window_tokens=options.get("window_tokens", 256)),
            sglang_config(**self._config),
            chunk_interval_s=options.get("chunk_interval_s", 0.0),
            eos_token_ids=options.get("eos_token_ids", ()),
            vocab=VOCAB,
            log_path=self._shm / "server.log",
            scratch=self._shm / options.get("name", "sglang"),
            server_url=None if self._own else self._pool.url(served),
        )
        self._made.append(engine)
        return engine

    async def awake(self, seed: int = 0, **options: Any) -> SglangEngine:  # type: ignore[override]
        engine = self.engine(**options)
        await engine.wake(self.weights(seed))
        return engine

    async def close(self) -> None:
        for engine in self._made:
            await engine.close()


@pytest.fixture
async def case(
    request: pytest.FixtureRequest, make_case: Callable[..., SglangCase]
) -> AsyncIterator[SglangCase]:
    made = make_case("llama")
    skip_what_it_lacks(made, request)
    yield made


@pytest.fixture
async def make_case(shm: Path, pool: Pool) -> AsyncIterator[Callable[..., SglangCase]]:
    """SglangCase, closed when the test is over."""
    made: list[SglangCase] = []

    def make(kind: str, **options: Any) -> SglangCase:
        made.append(SglangCase(kind, shm, pool, **options))
        return made[-1]

    yield make
    for case in made:
        await case.close()


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as folder:
        yield Path(folder)
