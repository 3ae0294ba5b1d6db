"""What a program pays that imports the runtime: 150 ms at most, a third of them asyncio's own."""

from __future__ import annotations

import subprocess
import sys

TIMES_ASYNCIO = 2.5
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


def test_importing_the_runtime_is_quick_and_needs_no_torch() -> None:
    # In a ratio, and at best, for the machine may be busy.
    ratios = [float(subprocess.check_output([sys.executable, "-c", CODE], timeout=50)) for _ in range(5)]
    assert min(ratios) < TIMES_ASYNCIO
