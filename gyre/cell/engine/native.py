"""The embedded engine: a transformers model, continuous batching, paged KV with prefix reuse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from transformers import PreTrainedModel

from gyre.cell.engine.driven import DrivenEngine
from gyre.cell.engine.runner import Runner
from gyre.rdma import Backend

R = TypeVar("R")

# A pass of a GPU is short even with so many tokens, and faster for them.
_STEP_TOKENS = {"cuda": 8192}


class NativeEngine(DrivenEngine):
    """A `DrivenEngine` over `model`, which the trainer of the cell may use while the engine sleeps.
    `device_thread`, of one worker, does all torch work."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        window_tokens: int,
        kv_tokens: int,
        block_tokens: int,
        max_batch: int,
        chunk_interval_s: float,
        eos_token_ids: tuple[int, ...],
        step_tokens: int | None = None,
        batch_invariant: bool = False,
        device_thread: ThreadPoolExecutor | None = None,
        regions: Backend | None = None,
    ) -> None:
        super().__init__(
            Runner(
                model, kv_tokens // block_tokens, block_tokens, min(window_tokens, kv_tokens), batch_invariant
            ),
            ThreadLane(device_thread),
            time.monotonic,
            window_tokens=window_tokens,
            kv_tokens=kv_tokens,
            block_tokens=block_tokens,
            max_batch=max_batch,
            chunk_interval_s=chunk_interval_s,
            eos_token_ids=eos_token_ids,
            step_tokens=step_tokens or _STEP_TOKENS.get(model.device.type, 512),
            regions=regions,
        )


class ThreadLane:
    """A thread of one worker: `thread`, or else one of its own."""

    def __init__(self, thread: ThreadPoolExecutor | None) -> None:
        self._owned = thread is None
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, job: Callable[[], R]) -> Future[R]:
        self._loop = asyncio.get_running_loop()
        return self._thread.submit(job)

    def run_pass(self, job: Callable[[], None]) -> None:
        self._thread.submit(job)

    def tell(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        if self._owned:
            self._thread.shutdown(wait=False)
