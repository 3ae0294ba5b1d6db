"""`python -m tests.rdma.gpu_holder FOLDER NUMBERS`: holds a tensor on the last GPU."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import torch

from gyre.rdma import SharedMemory
from gyre.rdma.cuda_ipc import CudaIpcBackend


def say(words: object) -> None:
    sys.stdout.write(msgspec.json.encode(words).decode() + "\n")
    sys.stdout.flush()


async def main(folder: str, numbers: str) -> None:
    device = torch.cuda.device_count() - 1
    tensor = torch.arange(int(numbers), dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
    backend = CudaIpcBackend(SharedMemory(Path(folder)), device)
    await backend.start()
    region = await backend.register("pool", tensor, writable=True)
    say(region.handle)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line == "close\n":
            await region.close()
        torch.cuda.synchronize(device)
        say(tensor[:1000].tolist())
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
