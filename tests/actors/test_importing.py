"""What a program pays that imports the runtime."""

from __future__ import annotations

import subprocess
import sys

CPU_MS = 150
CODE = """
import sys, time
start = time.process_time()
import gyre.actors
took = time.process_time() - start
assert "torch" not in sys.modules and "numpy" not in sys.modules
print(took * 1e3)
"""


def test_importing_the_runtime_is_quick_and_needs_no_torch() -> None:
    # Its CPU time, at best: the machine may be busy.
    took_ms = [float(subprocess.check_output([sys.executable, "-c", CODE], timeout=50)) for _ in range(3)]
    assert min(took_ms) < CPU_MS
