from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks.rdma.__main__ import gates, measure, way
from benchmarks.report import Report
from benchmarks.timing import QUICK

MIB = 2**20


async def test_figures_have_the_raw_ones_beside_them() -> None:
    report = Report("rdma")
    await measure(
        report, Console(quiet=True), names=["shm", "tcp"], effort=QUICK, nbytes=MIB, block_bytes=MIB // 4
    )
    assert set(report.figures) == {
        f"{name}_gb_per_s" for name in ("memcpy", "raw_tcp", "shm.read", "shm.write", "tcp.read", "tcp.write")
    }
    assert set(report.gates) == {
        f"{name}_ratio"
        for name in (
            "shm.read_to_memcpy",
            "shm.write_to_memcpy",
            "tcp.read_to_raw_tcp",
            "tcp.write_to_raw_tcp",
        )
    }


async def test_every_second_block_is_moved_once(tmp_path: Path) -> None:
    async with way("tcp", MIB, MIB // 8, tmp_path) as it:
        assert sorted(extent.remote for extent in it.extents) == [*range(0, 2 * MIB, MIB // 4)]
        await it.read(MIB)
        assert bytes(it.local.buffer) == b"\x01" * MIB


def test_gates() -> None:
    report = Report("rdma")
    per_s = {"memcpy": 10.0, "shm.read": 8.0, "shm.write": 7.9, "cuda_ipc.read": 199e9}
    gates(report, per_s)
    met = {name: gate.met for name, gate in report.gates.items()}
    assert met == {
        "shm.read_to_memcpy_ratio": True,
        "shm.write_to_memcpy_ratio": False,
        "cuda_ipc.read_gb_per_s": False,
    }
