from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.start import cpu_s, memory, process_of

BUSY = (
    "import time\nwhile time.process_time() < 0.1: pass\nheld = b'x' * 10**7\nprint(1, flush=True)\ninput()"
)


def test_a_rank_is_found_by_its_log_and_measured(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    with pytest.raises(LookupError):
        process_of(log)
    with log.open("wb") as output:
        busy = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=output)
    try:
        while not log.stat().st_size:
            assert busy.poll() is None
        process = process_of(log)
        assert process.name == str(busy.pid)
        assert cpu_s(process) >= 0.09
        sizes = memory(process)
        assert sizes["rss"] >= sizes["pss"] > 10**7
    finally:
        busy.communicate(b"\n")
