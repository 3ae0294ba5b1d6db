"""What a program pays that imports the runtime."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile

from benchmarks.report import Report
from benchmarks.timing import Effort

IMPORT_MS = 150.0
_CODE = "import time; start = time.perf_counter(); import gyre.actors; print(time.perf_counter() - start)"


async def importing(report: Report, effort: Effort) -> None:
    """Compiled modules are kept, as they are unless Python is told otherwise; the first run makes them."""
    with tempfile.TemporaryDirectory() as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        took_s = [await _import_s(environment) for _ in range(effort.rounds + 1)]
    report.figure("importing.gyre_actors_ms", min(took_s) * 1e3)
    report.at_most("importing.gyre_actors_ms", min(took_s) * 1e3, IMPORT_MS)


async def _import_s(environment: dict[str, str]) -> float:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CODE, stdout=asyncio.subprocess.PIPE, env=environment
    )
    out, _ = await process.communicate()
    return float(out)
