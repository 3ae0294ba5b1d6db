"""What a program pays that imports the runtime: 150 ms at most, half of them asyncio's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIMES_ASYNCIO = 1.6
CODE = """
import sys
from time import process_time
start = process_time()
import asyncio
loop = process_time()
import gyre.actors
end = process_time()
assert "torch" not in sys.modules and "numpy" not in sys.modules
print((end - loop) / (loop - start))
"""


def test_importing_the_runtime_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    # Compiled by the first; in a ratio, and at best, for the machine may be busy.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    python = [sys.executable, "-c", CODE]
    ratios = [float(subprocess.check_output(python, env=environment, timeout=50)) for _ in range(6)]
    assert min(ratios) < TIMES_ASYNCIO
