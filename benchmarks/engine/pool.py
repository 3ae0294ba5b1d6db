"""What a repeated prefix costs, and what the pool holds beside the tokens it is for."""

from __future__ import annotations

import asyncio
import random
from math import inf
from time import perf_counter
from typing import Any, cast

from benchmarks.engine.native import Native, answer
from benchmarks.engine.work import Work
from benchmarks.report import Report
from gyre.cell.engine.native import NativeEngine

PREFIX_TOKENS = 1000


async def prefix(report: Report, part: str, peer: Native, rounds: int) -> None:
    """A prompt of 1,000 tokens again, to what it took at first."""
    draw = random.Random("prefix")
    first_s = again_s = inf
    for number in range(rounds):
        (ids,) = Work(1, PREFIX_TOKENS, 1).prompts(draw)
        for turn in range(2):
            start = perf_counter()
            await answer(peer.engine, f"p{number}.{turn}", ids, 1)
            took_s = perf_counter() - start
            first_s, again_s = (
                (min(first_s, took_s), again_s) if not turn else (first_s, min(again_s, took_s))
            )
    report.figure(f"{part}.first_prefill_s", first_s)
    report.figure(f"{part}.repeated_prefill_s", again_s)
    report.at_most(f"{part}.repeated_prefix_cost_ratio", again_s / first_s, 0.1)


async def overhead(report: Report, peer: Native, calls: int = 16) -> None:
    """Bytes of the pool that calls of many lengths hold, to the bytes of their own keys and values: the rest
    of each last block, and the share of the block that pads."""
    draw = random.Random("pool")
    engine = peer.engine
    rollout: Any = cast(NativeEngine, engine)._rollout
    prompts = [Work(1, draw.randrange(200, 900), 1).prompts(draw)[0] for _ in range(calls)]
    tasks = [asyncio.create_task(answer(engine, f"o{i}", ids, 1000)) for i, ids in enumerate(prompts)]
    running = rollout._scheduler.running
    while len(running) < calls or any(sequence.remaining > 1 for sequence in tuple(running)):
        # A round trip, in which the engine goes on.
        await engine.abort("nobody")
    await engine.pause()
    data = rollout._runner._kv.data
    token_bytes = data[0].nbytes / data.shape[3]
    held_bytes = token_bytes * sum(sequence.computed for sequence in running)
    padded = data.nbytes / (len(data) - 1)
    report.at_most("pool.overhead_ratio", padded * engine.metrics().kv_blocks_used / held_bytes - 1, 0.05)
    await engine.abort_all()
    await asyncio.gather(*tasks)
    await engine.resume()
