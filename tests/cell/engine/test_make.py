from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gyre.cell.config import RolloutConfig
from gyre.cell.engine.make import EngineSetup, make_engine
from gyre.cell.engine.native import NativeEngine
from gyre.cell.engine.sglang import SglangEngine
from gyre.rdma import SharedMemory, make_backend
from tests.cell.engine.conftest import reference_model


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def setup_of(folder: Path, **changes: Any) -> EngineSetup:
    fields: dict[str, Any] = {
        "cell": 1,
        "rank": 0,
        "rollout": RolloutConfig(kv_tokens=128),
        "model_folder": folder,
        "log_folder": folder,
        "scratch": folder,
        "dtype": "float32",
        "window_tokens": 256,
        "eos_token_ids": (0,),
    }
    return EngineSetup(**(fields | changes))


@pytest.mark.parametrize(("engine", "kind"), [("native", NativeEngine), ("sglang", SglangEngine)])
async def test_the_job_chooses_the_engine(
    engine: Any, kind: type, thread: ThreadPoolExecutor, shm: Path, tmp_path: Path
) -> None:
    backend = make_backend("shm", where="", token=b"", shared=SharedMemory(shm))
    setup = setup_of(tmp_path, rollout=RolloutConfig(engine=engine, kv_tokens=128))
    made = make_engine(setup, reference_model("llama", 0), thread, backend)
    assert type(made) is kind
    assert made.version is None
    assert made.window_tokens == 128
    await made.close()


def test_gpus_that_no_server_can_take_are_refused(
    thread: ThreadPoolExecutor, shm: Path, tmp_path: Path
) -> None:
    backend = make_backend("shm", where="", token=b"", shared=SharedMemory(shm))
    rollout = RolloutConfig(engine="sglang", parallel="tensor")
    setup = setup_of(tmp_path, rollout=rollout, gpus=(3, 0))
    with pytest.raises(ValueError, match=r"cell-1-rank-0 has GPUs \(3, 0\)"):
        make_engine(setup, reference_model("llama", 0), thread, backend)
