"""A long run in virtual time keeps what it needs and no more.

GYRE_SOAK_HOURS=24 pytest tests/actors/testing/test_soak.py -s
"""

from __future__ import annotations

import os
import time

import pytest

from gyre.actors.links import Links
from gyre.actors.testing import Simulation
from gyre.actors.watching import Watchers
from tests.actors.testing.soak import Soak

HOURS = float(os.environ.get("GYRE_SOAK_HOURS", "0.5"))


def soaked(seed: int, hours: float) -> Soak:
    made: list[Soak] = []

    async def scenario(sim: Simulation) -> None:
        made.append(Soak(sim, hours))
        await made[0].run()

    Simulation(seed).run(scenario)
    return made[0]


@pytest.mark.timeout(120 + 120 * HOURS)
def test_memory_and_descriptors_stay() -> None:
    began = time.monotonic()
    soak = soaked(1, HOURS)
    for sample in soak.samples:
        print(sample)
    print(f"{HOURS} h in {time.monotonic() - began:.1f} s, {soak.sim.loop.steps} steps: {dict(soak.did)}")
    assert soak.grown() == []
    assert soak.did["answered"] > 50 * HOURS


@pytest.mark.parametrize("leak", ["watchers", "objects"])
def test_what_is_kept_too_long_is_seen(leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if leak == "watchers":
        monkeypatch.setattr(Watchers, "discard", lambda self, key: None)
    else:
        kept: list[object] = []
        opened = Links.opened

        def keeping(self: Links, link: object, *args: object) -> None:
            kept.append([[] for _ in range(2000)])
            opened(self, link, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Links, "opened", keeping)
    assert soaked(1, 1.0).grown() != []
