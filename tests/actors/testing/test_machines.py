"""A process on another machine under every fate of the two."""

from __future__ import annotations

import pytest

from gyre.actors.remote_process import RemoteProcess
from gyre.actors.testing import run_seeds
from gyre.actors.testing.seeds import run_seed
from tests.actors.testing.machines import machines
from tests.actors.testing.test_simulation import SEEDS

pytestmark = pytest.mark.timeout(max(120, SEEDS))


def test_all_seeds_hold() -> None:
    run_seeds(machines, range(max(20, SEEDS // 2)))


def test_the_seeds_find_a_process_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its node does not end what it ran for one that is gone."""

    async def leave_it(running: object, shutdown_s: float) -> None:
        return

    monkeypatch.setattr("gyre.actors.desk._end", leave_it)
    assert any("live" in run_seed(machines, seed).fault for seed in range(40))


def test_the_seeds_find_an_end_that_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteProcess, "_over", lambda self, reason: None)
    assert any(run_seed(machines, seed).fault for seed in range(40))
