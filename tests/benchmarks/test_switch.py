from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from benchmarks.report import Report
from benchmarks.switch.__main__ import flat, quantile, summarise
from benchmarks.switch.resources import Resources, look
from gyre.cell.messages import CellUp
from gyre.schedule.roster import CellLife
from gyre.schedule.transitions import Change

HELD = Resources(
    processes=6, memory_bytes=100_000_000, descriptors=90, mapped=4, sockets=30, threads=20, regions=1
)


def change(**states_s: float) -> Change:
    up = CellUp(
        cell=1,
        incarnation=1,
        ref=None,
        engines=(),
        role="rollout",
        version=0,
        capacity_calls=1,
        window_tokens=1,
    )  # type: ignore[arg-type]
    made = Change(1, CellLife(up), "")
    made.states_s = states_s
    return made


def test_states_by_quantiles_and_their_sum() -> None:
    report = Report("switch")
    summarise(report, "to_train", [change(cancel=0.1 * n, build_group=0.2) for n in range(1, 101)])
    assert report.figures["to_train.cancel_p50_s"] == 5.1
    assert report.figures["to_train.cancel_p99_s"] == 10.0
    assert report.figures["to_train.all_p99_s"] == 10.2
    assert quantile([3.0, 1.0], 0.5) == 3.0


def test_what_grows_is_found_and_what_comes_and_goes_is_not() -> None:
    def gates(*held: Resources) -> set[str]:
        report = Report("switch")
        flat(report, list(held))
        return {name for name, gate in report.gates.items() if not gate.met}

    busy = msgspec.structs.replace(HELD, descriptors=99, memory_bytes=150_000_000)
    assert gates(*[HELD, busy, HELD, busy, HELD, busy]) == set()
    fewer = msgspec.structs.replace(HELD, sockets=10)
    assert gates(fewer, fewer, HELD, HELD, HELD, HELD) == set()
    more = msgspec.structs.replace(HELD, threads=21)
    assert gates(HELD, HELD, HELD, HELD, more, more) == {"threads_grown_by"}
    more = msgspec.structs.replace(HELD, memory_bytes=104_000_000)
    assert gates(HELD, HELD, HELD, HELD, more, more) == {"memory_growth_ratio"}


def test_children_count_with_their_threads_and_descriptors(tmp_path: Path) -> None:
    gc.collect()  # of earlier tests
    before = look(tmp_path, cuda=False)
    (tmp_path / "w0").touch()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with socket.socket(), open(os.devnull):
            after = look(tmp_path, cuda=False)
    finally:
        over.set()
        thread.join()
        child.communicate(b"\n")
    assert after.processes == before.processes + 1
    assert after.threads == before.threads + 2
    assert after.sockets == before.sockets + 1
    assert after.descriptors >= before.descriptors + 2
    assert after.regions == 1
    assert after.memory_bytes > before.memory_bytes
