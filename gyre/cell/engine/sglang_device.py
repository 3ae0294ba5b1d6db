"""The memory of the GPUs that a server is on: whether what was given back really is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gyre.cell.engine.base import EngineFault

FREE_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.02
# Of what a server took when it woke.
RETURNED = 0.9
# Contexts, communicators and kernels, of whatever it took when it started: they stay as long as it lives.
STAYS_BYTES = 2 << 30

# Free and all bytes of a device, over all processes.
Memory = Callable[[], tuple[int, int]]


def cuda_memory(gpu: int) -> tuple[int, int]:
    import torch

    return torch.cuda.mem_get_info(gpu)


class DeviceMemory:
    """What a server takes while it is awake. `memory` is None on a CPU, where nothing is checked."""

    def __init__(self, memory: Memory | None, timeout_s: float = FREE_TIMEOUT_S) -> None:
        self._memory = memory
        self._timeout_s = timeout_s
        self._free_before: int | None = None
        self._may_stay = 0

    async def until_startable(self, fraction: float) -> None:
        """Before a start: what crashed before may still hold its memory. EngineFault where `fraction` of
        the device does not become free."""
        if self._memory is None:
            return
        _, total = self._memory()
        await self._until(int(fraction * total), "to start a server in")

    def before_taking(self) -> None:
        if self._memory is not None:
            self._free_before, _ = self._memory()

    def taken(self, stays: int = 0) -> None:
        """`stays` bytes are not for giving back."""
        if self._memory is not None and self._free_before is not None:
            taken = max(0, self._free_before - self._memory()[0])
            self._may_stay = stays + int((1 - RETURNED) * taken)

    async def until_returned(self) -> None:
        """After a release. EngineFault where what was taken does not come back."""
        if self._memory is not None and self._free_before is not None:
            await self._until(self._free_before - self._may_stay, "after the server released its memory")

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
                f" {wanted / 2**30:.1f}, for {self._timeout_s:g} s: another process holds the rest"
            ) from None
