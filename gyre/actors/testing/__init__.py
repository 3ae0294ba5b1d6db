"""Whole systems of nodes in virtual time, deterministic by a seed: for tests of what actors do when the
network and the processes under them fail.

    async def scenario(sim: Simulation) -> None: ...

    Simulation(seed=7).run(scenario)
"""

from gyre.actors.testing.loop import Host, SimLoop, Stuck
from gyre.actors.testing.network import SimNetwork, SimTransport, Weather
from gyre.actors.testing.seeds import run_seeds
from gyre.actors.testing.simulation import Simulation, Violated

__all__ = [
    "Host",
    "SimLoop",
    "SimNetwork",
    "SimTransport",
    "Simulation",
    "Stuck",
    "Violated",
    "Weather",
    "run_seeds",
]
