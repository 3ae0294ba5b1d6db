"""What a program pays that imports the runtime."""

from __future__ import annotations

import asyncio
import sys

from benchmarks.report import Report
from benchmarks.timing import Effort

IMPORT_MS = 150.0
_CODE = "import time; start = time.perf_counter(); import gyre.actors; print(time.perf_counter() - start)"


async def importing(report: Report, effort: Effort) -> None:
    best_s = min([await _import_s() for _ in range(effort.rounds)])
    report.at_most("importing.gyre_actors_ms", best_s * 1e3, IMPORT_MS)


async def _import_s() -> float:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CODE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return float(out)
