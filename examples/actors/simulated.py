"""`process.py` in virtual time: the same actors, processes that die when the seed says, hundreds of runs."""

from __future__ import annotations

import asyncio
import logging

import structlog
from primes import FinderConfig, Primes

from gyre.actors import AwaitChild, ChildSpec, ProcessSpec, Supervisor, resumed
from gyre.actors.testing import Simulation, run_seeds

PRIMES = [n for n in range(2, 200) if all(n % factor for factor in range(2, n))]


async def scenario(sim: Simulation) -> None:
    """Whatever dies when, every prime comes once and in order."""
    root = sim.host("root")

    async def main() -> list[int]:
        async with sim.node("root", root) as node:
            finder = ProcessSpec(name="finder", actor="primes:Finder", config=FinderConfig())
            start = lambda: Supervisor([finder], max_restarts=10**6)  # noqa: E731
            supervisor = await node.spawn(ChildSpec(name="finders", start=start))
            found = resumed(
                lambda left: supervisor.ask(AwaitChild(name="finder", after=left)), Primes(below=200)
            )
            primes = []
            async for prime in found:
                primes.append(prime)
                await asyncio.sleep(0.1)  # virtual: it costs nothing
            return primes

    running = sim.start(root, main())
    while not running.done():
        await asyncio.sleep(sim.rng.random())
        for host in sim.hosts:
            if host.alive and host.name.startswith("finder"):
                sim.kill(host)
    if running.result() != PRIMES:
        sim.violate(f"got {running.result()}")


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    runs = run_seeds(scenario, range(20))
    print(f"{len(runs)} seeds hold, {sum(run.virtual_s for run in runs):.0f} virtual seconds")
    again = run_seeds(scenario, [3])[0]
    print("the same seed is the same run:", again.trace == runs[3].trace)
