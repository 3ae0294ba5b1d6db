"""`python -m benchmarks.rdma.holder BACKEND FOLDER BYTES DEVICE`: the process that holds the region."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from benchmarks.rdma.backends import made
from gyre.actors import run


async def hold(name: str, folder: str, nbytes: str, device: str) -> None:
    backend = made(name, Path(folder), int(device))
    await backend.start()
    region = await backend.allocate("pool", int(nbytes), writable=True)
    if name != "cuda_ipc":
        region.buffer[:] = b"\x01" * int(nbytes)
    os.write(1, msgspec.json.encode(region.handle) + b"\n")
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.read)  # its end is ours
    await backend.close()


if __name__ == "__main__":
    run(hold(*sys.argv[1:]))
