"""The engine of a rank, as the job chooses it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gyre.cell.config import RolloutConfig
from gyre.cell.engine.base import Engine
from gyre.rdma import Backend

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. `gpus` are the ones that are its cell's, or its rank's where each rank has an engine; none
    on the CPU. `name` tells it from the other engines of the machine."""

    name: str
    rollout: RolloutConfig
    model_folder: Path
    log_folder: Path
    dtype: str
    window_tokens: int
    eos_token_ids: tuple[int, ...]
    gpus: tuple[int, ...] = ()


def make_engine(
    setup: EngineSetup, model: PreTrainedModel, device_thread: ThreadPoolExecutor, regions: Backend
) -> Engine:
    """Asleep. `model` and `device_thread` are the rank's own, for an engine that runs in its process."""
    return _native(setup, model, device_thread, regions)


def _native(
    setup: EngineSetup, model: PreTrainedModel, device_thread: ThreadPoolExecutor, regions: Backend
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
        device_thread=device_thread,
        regions=regions,
    )
