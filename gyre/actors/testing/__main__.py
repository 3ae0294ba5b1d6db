"""`python -m gyre.actors.testing package.module:scenario [--seed N] [--seeds M]`"""

from __future__ import annotations

import argparse
import importlib
import sys

from gyre.actors.testing.seeds import replay, run_seed


def main() -> int:
    """Runs seeds of a scenario; 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m gyre.actors.testing", description=__doc__)
    parser.add_argument("scenario", help="package.module:name of an async function of a Simulation")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    options = parser.parse_args()
    module, _, name = options.scenario.partition(":")
    scenario = getattr(importlib.import_module(module), name)
    failed = 0
    for seed in range(options.seed, options.seed + options.seeds):
        run = run_seed(scenario, seed)
        print(f"seed {seed}: {run.steps} steps, {run.virtual_s:.3f} virtual s, trace {run.trace}")
        if run.fault:
            failed += 1
            print(f"{run.fault}\nreplay: {replay(scenario, seed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
