"""The actor runtime beside a bare loop, xoscar and the machine's own limits: `python -m benchmarks.actors`."""
