"""`python -m benchmarks.kv.source BACKEND FOLDER DEVICE SESSION,...`: the process whose sessions move. Told a
session it pins its KV, told `release PIN` it lets go."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.kv.engines import SESSIONS, Bench
from benchmarks.process import quiet
from gyre.actors import run


async def serve(backend: str, folder: str, device: str, sessions: str) -> None:
    names = sessions.split(",")
    room = sum(SESSIONS[name] for name in names) + 1024
    it = Bench(backend, Path(folder), "source", torch.device(device), room)
    await it.start()
    for name in names:
        await it.write(name)
    _say({})
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        if line[0] == "release":
            _say({"held": await it.engine.release_kv(line[1])})
        else:
            _say(await it.engine.export_kv(line[0], 600.0))
    await it.close()


def _say(what: Any) -> None:
    found = memoryview(msgspec.json.encode(what) + b"\n")
    while found:
        found = found[os.write(1, found) :]


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    run(serve(*sys.argv[1:]))
