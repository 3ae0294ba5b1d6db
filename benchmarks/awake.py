"""Keeps one core from halting: spins, and gives way to whatever else wants to run there."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.process import companion


@asynccontextmanager
async def awake_cores() -> AsyncIterator[None]:
    """Within it no core halts. A core that does takes longer to wake up, with cold caches, than an ask takes,
    by how much is the host's choice: what is measured then is that."""
    async with AsyncExitStack() as stack:
        for core in sorted(os.sched_getaffinity(0)):
            await stack.enter_async_context(companion("benchmarks.awake", str(core)))
        yield


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    print("{}", flush=True)
    ended = select.poll()
    ended.register(sys.stdin, select.POLLHUP | select.POLLIN)
    while not ended.poll(0):
        for _ in range(1000):
            pass


if __name__ == "__main__":
    main()
