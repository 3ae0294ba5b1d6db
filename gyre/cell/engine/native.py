"""The embedded engine: a transformers model, continuous batching, paged KV with prefix reuse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from transformers import PreTrainedModel

from gyre.cell.engine.base import EngineFault, OnPublish
from gyre.cell.engine.driven import DrivenEngine
from gyre.cell.engine.kv_home import KvHome
from gyre.cell.engine.lead import Lead
from gyre.cell.engine.runner import Runner
from gyre.cell.engine.share import Share
from gyre.cell.engine.team import Team

R = TypeVar("R")

# A pass of a GPU is short even with so many tokens, and faster for them.
_STEP_TOKENS = {"cuda": 8192}


class NativeEngine(DrivenEngine):
    """A `DrivenEngine` over `model`, which the trainer of the cell may use while the engine sleeps.
    `device_thread`, of one worker, does all torch work. With more `ranks` than one this is the leading one:
    it takes a `Team` with the others' `Follower`s by `join`, before each wake, and weights that lie in a
    region."""

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
        ranks: int = 1,
        device_thread: ThreadPoolExecutor | None = None,
        kv_home: KvHome | None = None,
        on_publish: OnPublish = "recompute",
        kv_rest_bytes: int = 0,
    ) -> None:
        runner = self._runner = Runner(
            model,
            kv_tokens // block_tokens,
            block_tokens,
            min(window_tokens, kv_tokens),
            batch_invariant,
            Share(0, ranks),
            kv_home and kv_home.file,
        )
        self._lead = Lead(runner, ranks, self._fail, kv_home and kv_home.file) if ranks > 1 else None
        self._thread_lane = ThreadLane(device_thread)
        super().__init__(
            self._lead or runner,
            self._thread_lane,
            time.monotonic,
            window_tokens=window_tokens,
            kv_tokens=kv_tokens,
            block_tokens=block_tokens,
            max_batch=max_batch,
            chunk_interval_s=chunk_interval_s,
            eos_token_ids=eos_token_ids,
            step_tokens=step_tokens or _STEP_TOKENS.get(model.device.type, 512),
            kv_home=kv_home,
            on_publish=on_publish,
            # Of several GPUs what is in their stages is all that this process reaches.
            kv_rest_bytes=0 if ranks > 1 and model.device.type == "cuda" else kv_rest_bytes,
        )

    def join(self, team: Team) -> None:
        """Goes on with these followers; on the device thread."""
        assert self._lead is not None, "an engine of one rank has no followers"
        self._lead.join(team)

    async def watch(self) -> None:
        if self._lead is None:
            await super().watch()
        else:
            # Shielded: others may watch too.
            why = await asyncio.shield(asyncio.wrap_future(self._lead.lost))
            raise EngineFault(f"the engine is lost: {why}")

    def _end(self) -> None:
        super()._end()
        self._runner.close()
        if self._lead is not None:
            self._lead.part()

    def _fail(self) -> None:
        """A follower is gone: told from another thread, and to calls that no pass runs for too."""
        self._thread_lane.run_pass(partial(self._job, partial(self._guarded, self._fail_calls)))

    def _fail_calls(self) -> None:
        self._rollout.resume()
        self._check()

    def _check(self) -> None:
        if self._lead is not None:
            self._lead.check()


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
