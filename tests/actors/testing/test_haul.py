"""Blobs under faults, by seeds."""

from __future__ import annotations

import os

import pytest

from gyre.actors.bulk.incoming import Incoming
from gyre.actors.bulk.outgoing import Outgoing
from gyre.actors.testing import run_seeds
from gyre.actors.testing.seeds import run_seed
from tests.actors.testing import haul

# Thousands: GYRE_HAUL_SEEDS=2000 pytest tests/actors/testing/test_haul.py
SEEDS = int(os.environ.get("GYRE_HAUL_SEEDS", "8"))

pytestmark = pytest.mark.timeout(max(120, 10 * SEEDS))


def test_all_that_was_told_comes_where_nothing_breaks() -> None:
    run_seeds(haul.calm, range(max(3, SEEDS // 4)))


def test_all_seeds_hold_and_leave_nothing_out() -> None:
    haul.HAPPENED.clear()
    run_seeds(haul.haul, range(SEEDS))
    assert {"done", "cancelled", "ActorDied", "AskTimeout", "kill"} <= set(haul.HAPPENED)


def test_all_seeds_hold_in_a_slow_network() -> None:
    run_seeds(haul.slow, range(max(3, SEEDS // 4)))


def test_the_same_seed_is_the_same_run() -> None:
    assert run_seed(haul.haul, 3).trace == run_seed(haul.haul, 3).trace


def test_the_seeds_find_a_message_that_overtakes_one_with_a_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Incoming, "hold", lambda self, frame: False)
    assert any("after" in run_seed(haul.calm, seed).fault for seed in range(3))


def test_the_seeds_find_blobs_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outgoing, "drop", lambda self, message: None)
    assert any("still has blobs on their way" in run_seed(haul.calm, seed).fault for seed in range(3))
