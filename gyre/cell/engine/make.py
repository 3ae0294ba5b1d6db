"""The engine of a rank, as the job chooses it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gyre.cell.config import RolloutConfig
from gyre.cell.engine.base import Engine, Weights
from gyre.cell.engine.kv_home import KvHome, PoolFile
from gyre.rdma import Backend, RegionHandle, SharedMemory

# Of a stage by which KV goes in and out of a GPU: large, as each costs some turns of event loops.
SLOT_BYTES = 128 * 2**20

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gyre.cell.engine.follower import Follower


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, of `rank` of `cell`, or of all its `ranks` if there are more. `gpus` are those that are its
    cell's, or its rank's where each rank has an engine; none on the CPU. `scratch` is a folder in memory."""

    cell: int
    rank: int
    rollout: RolloutConfig
    model_folder: Path
    log_folder: Path
    scratch: Path
    dtype: str
    window_tokens: int
    eos_token_ids: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    ranks: int = 1


def make_engine(
    setup: EngineSetup, model: PreTrainedModel, device_thread: ThreadPoolExecutor, backend: Backend | None
) -> Engine:
    """Asleep. KV is handed over by `backend`. `model` and `device_thread` are the rank's own, for an engine
    that runs in its process."""
    if setup.rollout.engine == "sglang":
        return _sglang(setup, model.config.vocab_size)
    return _native(setup, model, device_thread, backend)


def _sglang(setup: EngineSetup, vocab: int) -> Engine:
    from gyre.cell.engine.sglang import SglangEngine
    from gyre.cell.engine.sglang_launch import Served

    rollout = setup.rollout
    name = f"cell-{setup.cell}-rank-{setup.rank}"
    url = rollout.sglang.server_url
    first = setup.gpus[0] if setup.gpus else 0
    if setup.gpus != tuple(range(first, first + len(setup.gpus))):
        raise ValueError(f"{name} has GPUs {setup.gpus}: SGLang takes adjacent ones, give cells fewer ranks")
    served = Served(
        model_folder=setup.model_folder,
        dtype=setup.dtype,
        window_tokens=setup.window_tokens,
        kv_tokens=rollout.kv_tokens,
        block_tokens=rollout.block_tokens,
        max_batch=rollout.max_batch,
        device="cuda" if setup.gpus else "cpu",
        gpu=first,
        ranks=max(len(setup.gpus), 1),
    )
    return SglangEngine(
        served,
        rollout.sglang,
        chunk_interval_s=rollout.chunk_interval_s,
        eos_token_ids=setup.eos_token_ids,
        vocab=vocab,
        log_path=setup.log_folder / f"{name}-sglang.log",
        scratch=setup.scratch / f"{name}-sglang",
        server_url=url and url.format(cell=setup.cell, rank=setup.rank),
    )


def _native(
    setup: EngineSetup, model: PreTrainedModel, device_thread: ThreadPoolExecutor, backend: Backend | None
) -> Engine:
    # Here, because it imports torch and transformers.
    from gyre.cell.engine.native import NativeEngine

    rollout = setup.rollout
    return NativeEngine(
        model,
        window_tokens=setup.window_tokens,
        kv_tokens=rollout.kv_tokens,
        block_tokens=rollout.block_tokens,
        max_batch=rollout.max_batch,
        chunk_interval_s=rollout.chunk_interval_s,
        eos_token_ids=setup.eos_token_ids,
        batch_invariant=rollout.batch_invariant,
        ranks=setup.ranks,
        device_thread=device_thread,
        kv_home=None if backend is None else _home(setup, backend, model.device.type),
        on_publish=rollout.on_publish,
        kv_rest_bytes=rollout.kv_rest_bytes,
    )


def make_follower(
    setup: EngineSetup,
    model: PreTrainedModel,
    device_thread: ThreadPoolExecutor,
    weights: Callable[[int, RegionHandle], Weights],
) -> Follower:
    """What `setup.rank` does for the native engine that rank 0 leads. `weights` finds those of a version in a
    region."""
    from gyre.cell.engine.follower import Follower
    from gyre.cell.engine.runner import Runner
    from gyre.cell.engine.share import Share

    rollout = setup.rollout
    runner = Runner(
        model,
        rollout.kv_tokens // rollout.block_tokens,
        rollout.block_tokens,
        min(setup.window_tokens, rollout.kv_tokens),
        rollout.batch_invariant,
        Share(setup.rank, setup.ranks),
        _pool_file(setup),
    )
    return Follower(runner, device_thread, weights)


def kv_name(cell: int, rank: int) -> str:
    """Of the pool of a rank; all names of what belongs to its KV begin so."""
    return f"kv-{cell}-{rank}"


def _home(setup: EngineSetup, backend: Backend, device: str) -> KvHome:
    staged = device == "cuda" and backend.name != "cuda_ipc"
    return KvHome(
        backend, SharedMemory(setup.scratch), kv_name(setup.cell, setup.rank), SLOT_BYTES if staged else 0
    )


def _pool_file(setup: EngineSetup) -> PoolFile:
    return PoolFile(SharedMemory(setup.scratch), kv_name(setup.cell, setup.rank))
