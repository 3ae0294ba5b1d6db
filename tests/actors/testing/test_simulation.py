"""Whole simulated jobs: many seeds, the same trace, planted bugs, a kill at every step."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.actors import AskTimeout
from gyre.actors.link import Link
from gyre.actors.testing import Simulation, Violated, Weather, run_seeds
from gyre.actors.testing.seeds import replay, run_seed
from gyre.actors.wire import Frame, Taken
from tests.actors.testing import job

# Thousands of seeds: GYRE_SEEDS=5000 pytest tests/actors/testing -k seeds
SEEDS = int(os.environ.get("GYRE_SEEDS", "50"))

pytestmark = pytest.mark.timeout(max(120, SEEDS))


def test_all_seeds_hold() -> None:
    runs = run_seeds(job.chaos, range(SEEDS))
    assert len({run.trace for run in runs}) == SEEDS


def test_all_seeds_hold_in_bad_weather() -> None:
    run_seeds(job.storm, range(SEEDS // 4))


def test_the_same_seed_is_the_same_run_in_two_processes() -> None:
    command = [sys.executable, "-m", "gyre.actors.testing", "tests.actors.testing.job:chaos", "--seed", "5"]
    said = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=environment,
            cwd=Path(__file__).parents[3],
        )
        said.append(next(line for line in done.stdout.splitlines() if line.startswith("seed 5")))
    assert said[0] == said[1]
    here = run_seed(job.chaos, 5)
    assert here.trace in said[0]


def test_a_failing_seed_names_the_command_that_replays_it() -> None:
    async def broken(sim: Simulation) -> None:
        await asyncio.sleep(1.0)
        if sim.seed == 3:
            raise ValueError("found it")

    with pytest.raises(AssertionError, match=r"(?s)found it.*--seed 3"):
        run_seeds(broken, range(5))
    assert replay(job.chaos, 3) == ("python -m gyre.actors.testing tests.actors.testing.job:chaos --seed 3")


def test_the_seeds_find_a_dropped_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_seed(job.flood, 0).fault
    send, count = Link.send, 0

    def forgetful(self: Link, frame: Frame) -> None:
        nonlocal count
        count += isinstance(frame, Taken)
        if not isinstance(frame, Taken) or count % 2:
            send(self, frame)

    monkeypatch.setattr(Link, "send", forgetful)
    assert all("MailboxFull" in run_seed(job.flood, seed).fault for seed in range(3))


def test_the_seeds_find_an_answer_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is lost must fail what waits on it: without that, asks run into their deadlines."""
    monkeypatch.setattr(Link, "fail_all", lambda self, reason: self.node.links._links.pop(self.peer_id, None))
    assert any("lost its peer" in run_seed(job.prompt, seed).fault for seed in range(20))


@pytest.mark.parametrize("victim", ["cell-1", "other", "root", "ledger", "watcher", "cells"])
def test_a_kill_at_any_step_leaves_no_ask_unanswered(victim: str) -> None:
    steps = run_seed(job.short, 1).steps
    every = max(1, steps * 40 // (SEEDS * 10))
    for step in range(20, steps, every):
        run = run_seed(job.killed(victim, step), 1)
        assert not run.fault, f"{victim} killed at step {step}:\n{run.fault}"


def test_a_peer_without_a_sign_of_life_is_given_up() -> None:
    async def scenario(sim: Simulation) -> None:
        made = job.Job(sim)
        await made.run(lambda _: powerless(sim))
        assert made.outcomes["ActorDied"] > 0

    async def powerless(sim: Simulation) -> None:
        await asyncio.sleep(1.0)
        for host in [host for host in sim.hosts if host.name.startswith("cell")]:
            sim.power_off(host)

    Simulation(4).run(scenario)


def test_an_invariant_that_does_not_hold_ends_the_run() -> None:
    async def scenario(sim: Simulation) -> None:
        await asyncio.sleep(1.0)
        sim.violate("two cores")
        await asyncio.sleep(1.0)

    with pytest.raises(Violated, match=r"seed 9 at 1\.0.* two cores"):
        Simulation(9).run(scenario)


def test_weather_is_part_of_the_seed() -> None:
    async def scenario(sim: Simulation) -> None:
        await job.Job(sim).run()

    calm, slow = Simulation(1), Simulation(1, Weather(latency_s=(0.05, 0.1)))
    calm.run(scenario)
    slow.run(scenario)
    assert calm.trace != slow.trace


def test_deadlines_are_virtual() -> None:
    async def scenario(sim: Simulation) -> None:
        host = sim.host("a")

        async def main() -> None:
            async with sim.node("a", host) as node:
                ref = await node.spawn(job.slow_spec())
                with pytest.raises(AskTimeout):
                    await ref.ask(job.Ponder(seconds=1e6), timeout_s=1e5)

        await sim.start(host, main())
        assert sim.loop.time() == pytest.approx(1e5, abs=0.01)

    Simulation(0).run(scenario)
