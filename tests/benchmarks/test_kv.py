from __future__ import annotations

from rich.console import Console

from benchmarks.kv.__main__ import measure_all
from benchmarks.report import Report


async def test_a_session_moves_between_two_processes_beside_raw_copies() -> None:
    report = Report("kv")
    await measure_all(report, Console(quiet=True), ["tcp"], "cpu", True)
    assert set(report.figures) == {"tcp.4k_gb_per_s", "tcp.raw_tcp_gb_per_s"}
    assert set(report.gates) == {"tcp.4k_to_raw_tcp_ratio"}
