"""xoscar as a peer: its segments, or why there are none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.process import Companion, companion
from benchmarks.timing import Segment

XOSCAR = "benchmarks.actors.xoscar_peer"


class Xoscar:
    """`missing` says why it cannot be measured, or is empty."""

    def __init__(self, process: Companion) -> None:
        self._process = process
        self.missing: str = process.hello.get("missing", "")

    def segment(self, name: str, count: int) -> list[Segment]:
        """One, named `xoscar.NAME`; none where xoscar is missing."""

        async def run(count: int) -> float:
            answer = await self._process.ask(f"{name} {count}")
            seconds: float = answer["seconds"]
            return seconds

        return [] if self.missing else [Segment(f"xoscar.{name}", count, run)]


@asynccontextmanager
async def xoscar() -> AsyncIterator[Xoscar]:
    async with companion(XOSCAR) as process:
        yield Xoscar(process)
