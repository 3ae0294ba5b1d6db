"""The memory of the GPUs that a server is on: whether what was given back really is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gyre.cell.engine.base import EngineFault

FREE_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.02
# Of the bytes that a server says it holds; what it says is rounded, and drivers give back in pages.
RETURNED = 0.9
ROUNDING_BYTES = 64 << 20

# Free and all bytes of a device, over all processes.
Memory = Callable[[], tuple[int, int]]


def cuda_memory(gpu: int) -> tuple[int, int]:
    import torch

    return torch.cuda.mem_get_info(gpu)


class DeviceMemory:
    """`memory` is None on a CPU, where nothing is checked."""

    def __init__(self, memory: Memory | None, timeout_s: float = FREE_TIMEOUT_S) -> None:
        self._memory = memory
        self._timeout_s = timeout_s

    async def until_startable(self, fraction: float) -> None:
        """Before a start: what crashed before may still hold its memory. EngineFault where `fraction` of
        the device does not become free."""
        if self._memory is None:
            return
        _, total = self._memory()
        await self._until(int(fraction * total), "to start a server in")

    def free_bytes(self) -> int:
        return self._memory()[0] if self._memory is not None else 0

    async def until_returned(self, free_before: int, held: int) -> None:
        """After the release of `held` bytes, when `free_before` were free. EngineFault where they do not
        come back. Contexts, communicators and kernels stay as long as the server lives."""
        if self._memory is not None:
            wanted = free_before + max(0, int(RETURNED * held) - ROUNDING_BYTES)
            await self._until(wanted, "after the server released its memory")

    async def _until(self, wanted: int, when: str) -> None:
        assert self._memory is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                # Nothing tells when a driver has got memory back.
                while self._memory()[0] < wanted:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            free, total = self._memory()
            raise EngineFault(
                f"the GPU has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free {when}, wanted"
                f" {wanted / 2**30:.1f}, for {self._timeout_s:g} s"
            ) from None
