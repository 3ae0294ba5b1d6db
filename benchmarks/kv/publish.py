"""New weights under live calls: how long until all go on, with KV that is computed again and with KV kept."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.kv.engines import VOCAB, Bench
from benchmarks.report import Report
from gyre.cell.engine import GenerateRequest, OnPublish, SamplingParams

PROMPT_TOKENS = 1024
CALLS = {"cpu": 4, "cuda": 64}
TO_KEEPING = 5.0
WAYS: tuple[OnPublish, ...] = ("recompute", "keep")


class Live:
    """Calls that decode, of prompts that share nothing."""

    def __init__(self, bench: Bench, count: int) -> None:
        self._bench = bench
        self._count = count
        self._seen: asyncio.Queue[int] = asyncio.Queue()

    async def run(self) -> float:
        """Answers the seconds from the order to update until each call has a token of the new weights."""
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(self._call(number)) for number in range(self._count)]
            await self._all_at(self._bench.weights.version)
            self._bench.weights.version += 1
            start = perf_counter()
            await self._bench.engine.update(self._bench.weights)
            await self._all_at(self._bench.weights.version)
            took_s = perf_counter() - start
            for call in calls:
                call.cancel()
        return took_s

    async def _all_at(self, version: int) -> None:
        for _ in range(self._count):
            while await self._seen.get() != version:
                pass

    async def _call(self, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        prompt = tuple(torch.randint(VOCAB, (PROMPT_TOKENS,), generator=draw).tolist())
        request = GenerateRequest(
            call=f"live-{number}",
            session=f"live-{number}",
            prompt_ids=prompt,
            prompt_tokens=PROMPT_TOKENS,
            sampling=SamplingParams(max_new_tokens=PROMPT_TOKENS),
        )
        version = -1
        async for chunk in self._bench.engine.generate(request):
            if chunk.versions and chunk.versions[-1] > version:
                version = chunk.versions[-1]
                self._seen.put_nowait(version)


async def measure_publish(report: Report, folder: Path, device: str, rounds: int, calls: int) -> None:
    """In turn, the best of so many rounds."""
    best = dict.fromkeys(WAYS, float("inf"))
    async with AsyncExitStack() as stack:
        benches: dict[OnPublish, Bench] = {}
        for way in WAYS:
            room = 2 * calls * PROMPT_TOKENS
            bench = Bench("shm", folder, f"publish-{way}", torch.device(device), room, way, max_batch=calls)
            await bench.start()
            stack.push_async_callback(bench.close)
            benches[way] = bench
        for _ in range(rounds):
            for way, bench in benches.items():
                await bench.forget()
                best[way] = min(best[way], await Live(bench, calls).run())
    for way, took_s in best.items():
        report.figure(f"publish.{way}_{calls}_calls_of_1k_s", took_s)
    report.at_least("publish.recompute_to_keep_ratio", best["recompute"] / best["keep"], TO_KEEPING)
