"""KV of an idle session out of the pool into host memory, and back."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import torch

from benchmarks.actors.raw import Memcpy
from benchmarks.kv.engines import SESSIONS, Bench
from benchmarks.report import Report
from benchmarks.timing import Segment, rates

RAW_BYTES = 256 * 2**20


class Out:
    """Summed, copied, and let go of in the pool."""

    def __init__(self, bench: Bench, session: str) -> None:
        self._bench = bench
        self._session = session

    async def run(self, count: int) -> float:
        """Answers the seconds of the copy."""
        engine = self._bench.engine
        start = perf_counter()
        rested = await engine.rest_kv([self._session], 60.0)
        took_s = perf_counter() - start
        assert rested.tokens == SESSIONS[self._session], rested
        return took_s


class Back(Out):
    """What a wake does of it: reserved, copied, summed and made findable."""

    async def run(self, count: int) -> float:
        await super().run(count)
        await self._bench.forget()
        engine = self._bench.engine
        before = engine.metrics().kv_tokens_put_back
        start = perf_counter()
        await engine._wake_kv()
        took_s = perf_counter() - start
        assert engine.metrics().kv_tokens_put_back - before == SESSIONS[self._session]
        return took_s


async def measure_rest(report: Report, folder: Path, device: str, sessions: list[str], rounds: int) -> None:
    """Beside a copy of the host's memory."""
    most = max(SESSIONS[session] for session in sessions) + 1024
    on = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    bench = Bench("host" if device == "cuda" else "shm", folder, "rest", on, most, kv_rest_bytes=2**40)
    await bench.start()
    try:
        for session in sessions:
            await bench.write(session)
            nbytes = (await bench.engine.rest_kv([session], 60.0)).nbytes
            segments = [
                Segment(f"{session}_out", nbytes, Out(bench, session).run),
                Segment(f"{session}_back", nbytes, Back(bench, session).run),
                Segment(f"memcpy_beside_{session}", RAW_BYTES, Memcpy(RAW_BYTES).run),
            ]
            for name, rate in (await rates(segments, rounds)).items():
                report.figure(f"rest.{name}_gb_per_s", rate / 1e9)
            await bench.forget()
    finally:
        await bench.close()
