from __future__ import annotations

from rich.console import Console

from benchmarks.report import Report
from benchmarks.weights.__main__ import measure_size


async def test_weights_are_published_and_pulled_beside_raw_copies() -> None:
    report = Report("weights")
    await measure_size(report, Console(quiet=True), "tiny", "cpu", 1)
    assert {name.removesuffix("_gb_per_s") for name in report.figures} == {
        "tiny.publish",
        "tiny.publish_to_new_memory",
        "tiny.raw_publish",
        "tiny.pull",
        "tiny.pull_to_new_memory",
        "tiny.raw_pull",
        "tiny.tcp.pull",
        "tiny.tcp.pull_and_load",
        "tiny.tcp.raw",
    }
    assert len(report.gates) == 3
