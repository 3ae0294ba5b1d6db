"""An engine over a SGLang server, which it starts and stops, or which runs already."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import structlog

from gyre.cell.config import SglangConfig
from gyre.cell.engine.base import (
    KV_LEASE_S,
    Chunk,
    EngineAsleep,
    EngineFault,
    EngineMetrics,
    GenerateRequest,
    KvManifest,
    KvRested,
    KvUnavailable,
    Weights,
)
from gyre.cell.engine.sampled import SampledLeg
from gyre.cell.engine.sglang_counts import Counts
from gyre.cell.engine.sglang_launch import Served
from gyre.cell.engine.sglang_link import Link
from gyre.cell.engine.sglang_request import Requests
from gyre.cell.engine.sglang_streams import Streams
from gyre.cell.engine.sglang_wire import used_tokens

log = structlog.get_logger()

SCRAPE_S = 1.0
LOST_AFTER = 5
STOCK_KV = "a stock SGLang server gives no KV of a session away and takes none: see docs/sglang.md"


class SglangEngine:
    """An `Engine` (see base.py) over the SGLang server at `server_url`, or over one of its own that it starts
    when it is first woken and that ends with it. `scratch` is a folder in memory that the server sees.

    Draws are a function of seed, position and logits where the server runs with
    --enable-deterministic-inference, and of its own random state else.
    """

    def __init__(
        self,
        served: Served,
        config: SglangConfig,
        *,
        chunk_interval_s: float,
        eos_token_ids: tuple[int, ...],
        vocab: int,
        log_path: Path,
        scratch: Path,
        server_url: str | None = None,
    ) -> None:
        window_tokens = min(served.window_tokens, served.kv_tokens)
        self._requests = Requests(window_tokens, vocab, frozenset(eos_token_ids))
        self._counts = Counts(served.block_tokens, served.kv_tokens // served.block_tokens)
        self._link = Link(
            served,
            config,
            server_url=server_url,
            log_path=log_path,
            scratch=scratch,
            ended=self._server_ended,
        )
        self._linked = False
        self._version: int | None = None
        self._streams = Streams(self._link, self._requests, self._counts, chunk_interval_s)
        self._changing = asyncio.Lock()
        self._closed = False
        self._gone = asyncio.Event()
        self._fault: EngineFault | None = None
        self._scraping: asyncio.Task[None] | None = None

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def window_tokens(self) -> int:
        return self._requests.window_tokens

    # --- calls -------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        self._check_awake("generate")
        self._requests.check(request)
        over = self._requests.over_already(request)
        if over is not None:
            yield Chunk(token_ids=(), logprobs=(), versions=(), finish_reason=over)
            return
        async with aclosing(self._streams.chunks(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def abort(self, call: str) -> None:
        await self._streams.end(call)

    async def abort_all(self) -> None:
        await self._streams.end_all()

    async def end_session(self, session: str) -> tuple[SampledLeg, ...]:
        """What the server sampled and had not said is not in it."""
        return await self._streams.end_session(session)

    def forget_session(self, session: str) -> None:
        self._streams.sampled.forget(session)

    def metrics(self) -> EngineMetrics:
        return self._streams.metrics()

    # --- roles and versions ------------------------------------------------------------------------

    async def pause(self) -> None:
        async with self._changing:
            if self._version is None or self._streams.held:
                return
            self._streams.hold(True)
            await self._streams.call_back()

    async def resume(self) -> None:
        async with self._changing:
            self._streams.hold(False)

    async def sleep(self) -> None:
        async with self._changing:
            if self._version is not None:
                await self._fall_asleep()

    async def wake(self, weights: Weights) -> None:
        async with self._changing:
            if self._version is not None:
                raise RuntimeError(f"the engine is awake under version {self._version}: use update")
            await self._connect()
            try:
                async with self._link.delivery.read(weights) as load:
                    await self._link.take_back("weights")
                    await load()
                    await self._link.take_back("kv_cache", "cuda_graph")
            except BaseException:
                if self._fault is None:
                    with contextlib.suppress(EngineFault):
                        await self._link.release()
                raise
            self._version = weights.version
            self._scraping = self._streams.run(self._scrape())

    async def update(self, weights: Weights) -> None:
        async with self._changing:
            self._check_awake("update")
            try:
                async with self._link.delivery.read(weights) as load:
                    self._streams.admit(False)
                    await self._streams.call_back()
                    await self._link.until_empty()
                    await load()
                    self._version = weights.version
                    self._streams.admit(not self._streams.held)
            except BaseException:
                if self._version is not None and self._fault is None:
                    with contextlib.suppress(EngineFault):
                        await self._fall_asleep()
                raise

    async def export_kv(
        self, session: str, lease_s: float = KV_LEASE_S, call: str | None = None
    ) -> KvManifest:
        self._check_awake("export KV")
        raise KvUnavailable(STOCK_KV)

    async def release_kv(self, pin: str) -> bool:
        return False

    async def import_kv(self, manifest: KvManifest) -> int:
        self._check_awake("import KV")
        raise KvUnavailable(STOCK_KV)

    async def rest_kv(self, sessions: Sequence[str], budget_s: float) -> KvRested:
        self._check_awake("rest KV")
        raise KvUnavailable(STOCK_KV)

    async def watch(self) -> None:
        await self._gone.wait()
        assert self._fault is not None
        raise self._fault

    async def close(self) -> None:
        """Ends a server of its own; leaves another asleep."""
        if self._closed:
            return
        self._closed = True
        async with self._changing:
            if self._linked and not self._link.own and self._version is not None and self._fault is None:
                with contextlib.suppress(EngineFault):
                    await self._fall_asleep()
            self._version = None
            self._streams.finish_all()
            self._stop_scraping()
            await self._streams.close()
            if self._linked:
                await self._link.close()

    # --- inside ------------------------------------------------------------------------------------

    def _check_awake(self, what: str) -> None:
        if self._fault is not None:
            raise EngineFault(f"cannot {what}: {self._fault}")
        if self._version is None:
            raise EngineAsleep(f"the engine is asleep and cannot {what}")

    async def _fall_asleep(self) -> None:
        self._version = None
        self._stop_scraping()
        await self._streams.end_all()
        self._streams.hold(False)
        # Of calls that nobody listens to any more some may be there yet.
        await self._link.client.post("/abort_request", {"abort_all": True})
        await self._link.until_empty()
        await self._link.release()

    async def _connect(self) -> None:
        if self._fault is not None or self._closed:
            raise self._fault or EngineAsleep("the engine is closed")
        if not self._linked:
            info = await self._link.open()
            self._requests.seeded = info.enable_deterministic_inference
            self._linked = True

    def _server_ended(self, fault: EngineFault) -> None:
        self._fault = fault
        self._version = None
        self._stop_scraping()
        self._streams.fail_all(fault)
        self._gone.set()

    async def _scrape(self) -> None:
        """How much KV is in use; and whether a server that is not ours, whose end nobody tells, is there."""
        failed = 0
        while True:
            try:
                self._counts.used_tokens = used_tokens(await self._link.client.get("/v1/loads"))
                failed = 0
            except EngineFault as fault:
                failed += 1
                if failed == LOST_AFTER and not self._link.own:
                    self._server_ended(fault)
                    return
            await asyncio.sleep(SCRAPE_S)

    def _stop_scraping(self) -> None:
        if self._scraping is not None:
            self._scraping.cancel()
            self._scraping = None
