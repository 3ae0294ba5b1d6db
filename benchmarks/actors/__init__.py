"""The actor runtime beside a bare loop, xoscar and the machine: `python -m benchmarks.actors`."""
