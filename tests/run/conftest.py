"""One job, interrupted as soon as it idles, whose warm-started policy the others begin with."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.run.jobs import ROOT, SMALL, cpu_s, processes, running

IDLE_S, IDLE_SHARE = 5.0, 0.02


class Waited(NamedTuple):
    """What was seen of a job whose harnesses only sleep, by `gyre inspect` too, and of its end by one
    Ctrl-C. `policy` is a copy of the checkpoint that it left."""

    run_dir: Path
    policy: Path
    idle_cpu_s: dict[int, float]
    report: dict[str, Any]
    trace: list[dict[str, Any]]
    exit_code: int
    stop_s: float
    summary: dict[str, Any]


def inspect(run_dir: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `gyre inspect` says of a running job, line by line."""
    command = [sys.executable, "-c", "from gyre.cli import app; app()", "inspect", "--run", str(run_dir)]
    command += ["--timeout", "30"]
    said = subprocess.run([*command, "--json", *arguments], capture_output=True, text=True, cwd=ROOT)
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines()]


def least_used(pids: Sequence[int]) -> dict[int, float]:
    """Seconds of CPU of each process in IDLE_S, at best: they may have had something to do still."""
    least: dict[int, float] = {}
    for _ in range(4):
        before = cpu_s(pids)
        time.sleep(IDLE_S)
        used = {pid: after - before[pid] for pid, after in cpu_s(pids).items()}
        least = min(least or used, used, key=lambda found: sum(found.values()))
        if sum(least.values()) < IDLE_SHARE * IDLE_S:
            break
    return least


@pytest.fixture(scope="session")
def waited(tmp_path_factory: pytest.TempPathFactory) -> Waited:
    folder = tmp_path_factory.mktemp("jobs")
    run_dir, policy = folder / "first", folder / "policy"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sleep = ('harness.command=["sleep", "600"]', "harness.timeout_s=600", "harness.overall_timeout_s=900")
    # Metrics are served so that statuses are asked for.
    few = ("cells.cells=2", "eval.every_steps=0", f"watch.prometheus_port={port}")
    with running(run_dir, *SMALL, *sleep, *few, forks=True) as job:
        job.wait_for_count(2, "cell_up", timeout_s=240.0)
        asleep = {event["pid"] for event in job.wait_for_count(16, "harness_started")}
        pids = [pid for pid in processes(run_dir) if pid not in asleep]
        idle_cpu_s = least_used(pids)
        (report,) = inspect(run_dir, "--over", "0.5")
        trace = inspect(run_dir, "--trace", "3")
        began = time.monotonic()
        job.interrupt()
        exit_code = job.exit()
        stop_s = time.monotonic() - began
        job.assert_nothing_left()
        summary = job.summary()
    shutil.copytree(summary["checkpoint"], policy)
    return Waited(
        run_dir=run_dir,
        policy=policy,
        idle_cpu_s=idle_cpu_s,
        report=report,
        trace=trace,
        exit_code=exit_code,
        stop_s=stop_s,
        summary=summary,
    )
