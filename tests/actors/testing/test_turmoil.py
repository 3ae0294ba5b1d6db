"""Trees of actors under faults, by seeds."""

from __future__ import annotations

import os

import pytest

from gyre.actors.family import Family
from gyre.actors.flow import Flows
from gyre.actors.life import Life
from gyre.actors.testing import Simulation, Violated, run_seeds
from gyre.actors.testing.seeds import run_seed
from tests.actors.testing import job, turmoil

# Thousands: GYRE_TURMOIL_SEEDS=2000 pytest tests/actors/testing/test_turmoil.py
SEEDS = int(os.environ.get("GYRE_TURMOIL_SEEDS", "12"))

pytestmark = pytest.mark.timeout(max(120, 10 * SEEDS))


def test_all_seeds_hold_and_leave_nothing_out() -> None:
    turmoil.HAPPENED.clear()
    run_seeds(turmoil.turmoil, range(SEEDS))
    wanted = {"answered", "ActorDied", "WouldDeadlock", "AskTimeout", "crash", "leave", "hire", "fire"}
    wanted |= {"escalation", "down error", "down stopped", "down normal", "down exit", "down lost"}
    wanted |= {f"fault {number}" for number in range(7)}
    assert wanted <= set(turmoil.HAPPENED)


def test_all_seeds_hold_in_a_gale() -> None:
    run_seeds(turmoil.gale, range(max(3, SEEDS // 4)))


def test_the_seeds_find_a_restart_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Family.ended

    def forgetful(self: Family, child: object, running: object, reason: object) -> None:
        if self._node.rng.random() < 0.5:
            ended(self, child, running, reason)  # type: ignore[arg-type]

    monkeypatch.setattr(Family, "ended", forgetful)
    assert any("do not live" in run_seed(turmoil.turmoil, seed).fault for seed in range(3))


def test_the_seeds_find_a_down_that_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Life.deliver

    def twice(self: Life, message: object) -> None:
        deliver(self, message)  # type: ignore[arg-type]
        deliver(self, message)  # type: ignore[arg-type]

    monkeypatch.setattr(Life, "deliver", twice)
    assert any("got 2 Downs" in run_seed(turmoil.turmoil, seed).fault for seed in range(3))


def test_a_writer_that_minds_no_credit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flows, "has_room", lambda self, actor_id: True)
    assert "messages under way from other" in run_seed(job.flood, 0).fault


def test_a_child_that_outlives_its_parent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def careless(self: Family) -> None:
        return

    monkeypatch.setattr(Family, "close", careless)

    async def scenario(sim: Simulation) -> None:
        host = sim.host("root")

        async def main() -> None:
            async with sim.node("root", host) as node:
                ref = await node.spawn(turmoil.plant_spec("one_for_one"))
                node.lives[ref.id].request_stop()
                await node.lives[ref.id].ended

        await sim.start(host, main())

    with pytest.raises(Violated, match=r"one_for_one#1 is dead, its children .* live"):
        Simulation(1).run(scenario)
