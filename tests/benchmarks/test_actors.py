from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.actors.messages import FIELDS, AskStep, Step, TellStep

ROOT = Path(__file__).parents[2]

GATES = {
    "importing.gyre_actors_ms",
    "inside.ask_sequential_to_bare_ratio",
    "inside.tell_per_s",
    "inside.spawn_per_s",
    "across.tcp.ask_p50_to_bare_ratio",
    "across.tcp.in_flight_to_bare_ratio",
    "across.tcp.in_flight_to_xoscar_ratio",
    "bulk.tcp_to_raw_ratio",
    "bulk.shared_to_memcpy_ratio",
    "memory.idle_actor_bytes",
    "memory.actors_in_one_process",
    "idle.cpu_fraction",
    "soak.rss_growth_ratio",
    "soak.new_fds",
}


def _run(*arguments: str, **environment: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.actors", "--quick", "--json", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert ran.returncode == 0, ran.stderr
    table, _, line = ran.stdout.rstrip("\n").rpartition("\n")
    assert "gate" in table
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.timeout(180)
def test_a_quick_run_measures_everything() -> None:
    found = _run("--soak", "1")
    assert found["benchmark"] == "actors"
    assert set(found["gates"]) == GATES
    ratios = [value for name, value in found["figures"].items() if not name.endswith("_fds")]
    assert all(value > 0 for value in ratios)
    assert found["gates"]["idle.cpu_fraction"]["value"] > 0


@pytest.mark.timeout(180)
def test_a_missing_peer_is_named_and_its_gate_not_met(tmp_path: Path) -> None:
    (tmp_path / "xoscar.py").write_text("raise ImportError('not here')")
    gates = _run("--only", "across", PYTHONPATH=str(tmp_path))["gates"]
    ratio = gates["across.tcp.in_flight_to_xoscar_ratio"]
    assert not ratio["met"]
    assert ratio["reason"] == "xoscar cannot be imported: not here"
    assert gates["across.tcp.in_flight_to_bare_ratio"]["value"] > 0


def test_what_was_not_soaked_is_not_met() -> None:
    gates = _run("--only", "soak")["gates"]
    assert {name: gate["met"] for name, gate in gates.items()} == {
        "soak.rss_growth_ratio": False,
        "soak.new_fds": False,
    }
    assert gates["soak.new_fds"]["reason"] == "not run: --soak 600"


def test_a_part_that_is_none_is_an_error() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.actors", "--only", "outside"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ran.returncode == 2
    assert "no part outside" in ran.stderr


@pytest.mark.parametrize("message", [Step, AskStep, TellStep])
def test_every_peer_gets_the_same_64_bytes(message: type[Step]) -> None:
    body = msgspec.msgpack.encode(message(seq=1, **FIELDS))
    assert body == msgspec.msgpack.encode(Step(seq=1, **FIELDS))
    assert len(body) == 64
