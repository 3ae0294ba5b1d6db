"""From GPU to GPU, or within one. Only with GYRE_TEST_DEVICE=cuda."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch

from gyre.rdma import Extent, Refused, RegionError, RegionHandle, SharedMemory, TransferError, probe
from gyre.rdma.cuda_ipc import CudaIpcBackend

NUMBERS = 16 * 2**20


class Holder:
    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.rdma.gpu_holder", str(folder), str(NUMBERS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.region = msgspec.json.decode(self.heard(), type=RegionHandle)

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, what: str) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return msgspec.json.decode(self.heard(), type=list[int])

    def end(self) -> None:
        self.process.communicate(timeout=30)


@pytest.fixture
def holder(folder: Path) -> Holder:
    return Holder(folder)


@pytest.fixture
async def backend(folder: Path) -> AsyncIterator[CudaIpcBackend]:
    torch.zeros(1, device="cuda:0")
    backend = CudaIpcBackend(SharedMemory(folder), 0)
    await backend.start()
    yield backend
    await backend.close()


async def test_blocks_are_read_and_written(backend: CudaIpcBackend, holder: Holder) -> None:
    tensor = torch.zeros(NUMBERS, dtype=torch.int32, device="cuda:0")
    torch.cuda.synchronize(0)
    mine = await backend.register("mine", tensor)
    block = 4096
    order = torch.randperm(4 * NUMBERS // block).tolist()
    await backend.read(
        mine, holder.region, [Extent(to * block, of * block, block) for to, of in enumerate(order)]
    )
    expected = torch.arange(NUMBERS, dtype=torch.int32).view(-1, block // 4)[order].flatten()
    assert torch.equal(tensor.cpu(), expected)
    tensor.fill_(7)
    torch.cuda.synchronize(0)
    await backend.write(mine, holder.region, [Extent(0, 400, 40)])
    assert holder.ask("look") == [*range(100), *[7] * 10, *range(110, 1000)]
    wrong = msgspec.structs.replace(holder.region, key=b"wrong")
    with pytest.raises(Refused, match="wrong key"):
        await backend.read(mine, wrong, [Extent(0, 0, 4)])
    # Its owner waits until it is not mapped here.
    async with asyncio.timeout(4):
        await asyncio.to_thread(holder.ask, "close")
    with pytest.raises(Refused, match="no such region"):
        await backend.read(mine, holder.region, [Extent(0, 0, 4)])
    await asyncio.to_thread(holder.end)


async def test_own_memory(backend: CudaIpcBackend, holder: Holder) -> None:
    mine = await backend.allocate("mine", 4 * NUMBERS)
    await backend.read(mine, holder.region, [Extent(0, 0, 4 * NUMBERS)])
    with pytest.raises(RegionError, match="is in the memory of a GPU"):
        _ = mine.buffer
    with pytest.raises(RegionError, match="no tensor on a GPU"):
        await backend.register("host", bytearray(10))
    with pytest.raises(RegionError, match="not contiguous"):
        await backend.register("rows", torch.zeros(4, 4, device="cuda:0")[:, 1])
    await asyncio.to_thread(holder.end)


async def test_many_reads_and_a_death_leave_nothing(backend: CudaIpcBackend, holder: Holder) -> None:
    mine = await backend.allocate("mine", 4 * NUMBERS)
    whole = [Extent(0, 0, 4 * NUMBERS)]
    await backend.read(mine, holder.region, whole)
    free, fds = torch.cuda.mem_get_info(0)[0], len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        await backend.read(mine, holder.region, whole)
    assert torch.cuda.mem_get_info(0)[0] >= free - 2**21
    assert len(os.listdir("/proc/self/fd")) <= fds

    async def read_on() -> None:
        while True:
            await backend.read(mine, holder.region, whole, timeout_s=10)

    reading = asyncio.ensure_future(read_on())
    await asyncio.sleep(0.05)
    holder.process.send_signal(signal.SIGKILL)
    with pytest.raises(TransferError, match="pool of"):
        await reading
    await asyncio.to_thread(holder.end)
    assert len(os.listdir("/proc/self/fd")) <= fds
    again = await backend.allocate("again", 4 * NUMBERS)
    await again.close()


async def test_it_can_be_used() -> None:
    assert [it.why for it in await probe() if it.name == "cuda_ipc"] == [""]
