"""How cuda_ipc gives up, with memory of the host in place of a GPU's. On GPUs: test_cuda_ipc.py."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gyre.rdma import Extent, SharedMemory, cuda_ipc
from gyre.rdma.cuda_driver import Allocation

STEP_BYTES = 1 << 16


class HostDriver:
    """Copies when it may, a step at a time."""

    def __init__(self, device: int) -> None:
        self._memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.copying = threading.Event()
        self.may = threading.Event()
        self.copies = 0

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def allocate(self, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes)
        self._memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, pointer: int) -> None:
        del self._memory[pointer]

    def device_of(self, pointer: int) -> int:
        return 0

    def share(self, pointer: int) -> Allocation:
        return Allocation(pointer.to_bytes(64, "little"), 0)

    def reach(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def let_go(self, pointer: int) -> None: ...

    def copy(self, op: str, local: int, remote: int, extents: Sequence[Extent]) -> None:
        self.copying.set()
        assert self.may.wait(30.0)
        self.copies += 1
        for here, there, nbytes in extents:
            ctypes.memmove(local + here, remote + there, nbytes)


async def test_after_a_cancelled_read_nothing_more_arrives(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(cuda_ipc, "Driver", HostDriver)
    monkeypatch.setattr(cuda_ipc, "STEP_BYTES", STEP_BYTES)
    here, there = (cuda_ipc.CudaIpcBackend(SharedMemory(folder), 0) for _ in range(2))
    await here.start()
    await there.start()
    mine = await here.allocate("mine", 4 * STEP_BYTES)
    theirs = await there.allocate("theirs", 4 * STEP_BYTES)
    driver = here._driver
    assert isinstance(driver, HostDriver)
    reading = asyncio.create_task(here.read(mine, theirs.handle, [Extent(0, 0, 4 * STEP_BYTES)]))
    await asyncio.to_thread(driver.copying.wait, 30.0)
    reading.cancel()
    await asyncio.sleep(0)
    assert not reading.done()
    driver.may.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert driver.copies == 1
    await here.read(mine, theirs.handle, [Extent(0, 0, 4 * STEP_BYTES)])
    assert driver.copies == 5
    await here.close()
    await there.close()
