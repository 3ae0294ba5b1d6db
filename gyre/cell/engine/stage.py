"""Host memory by which KV goes in and out of a pool that others cannot read themselves: that of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gyre.cell.engine.kv_home import PoolFile
from gyre.cell.engine.kv_relay import SLOTS_IN, SLOTS_OUT
from gyre.cell.page_lock import page_lock
from gyre.rdma import RegionHandle
from gyre.rdma.memory import pointer


class Stage:
    """Of one rank: slots for so many blocks like `block` [layers, 2, block_tokens, kv_heads, head_dim]. For a
    GPU it is page-locked, which takes a second for some GB: once, it stays while the engine sleeps. All on
    the device thread."""

    def __init__(self, file: PoolFile, block: torch.Tensor, slot_blocks: int) -> None:
        """Raises RegionError."""
        self._shared = file.shared
        self.slot_blocks = slot_blocks
        self.slot_bytes = slot_blocks * block.nbytes
        name, nbytes = f"{file.name}-stage", (SLOTS_OUT + SLOTS_IN) * self.slot_bytes
        file.shared.free(RegionHandle(backend="shm", name=name, nbytes=nbytes))
        region = file.shared.allocate(name, nbytes)
        self.handle = region.handle
        self.memory = region.buffer
        self._stream = torch.cuda.Stream(block.device) if block.is_cuda else None  # type: ignore[no-untyped-call]
        self._page_lock = page_lock(block.device)
        if self._page_lock is not None:
            self._page_lock.lock(pointer(self.memory), nbytes)

    def fill(self, slot: int, data: torch.Tensor, blocks: Sequence[int]) -> None:
        """With these blocks of a pool that no pass writes."""
        found = torch.tensor(blocks, device=data.device)
        nbytes = len(blocks) * (self.slot_bytes // self.slot_blocks)
        target = torch.frombuffer(self.slot(slot)[:nbytes], dtype=data.dtype).view(-1, *data.shape[1:])
        if self._stream is None:
            torch.index_select(data, 0, found, out=target)
            return
        self._stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(self._stream):
            target.copy_(data.index_select(0, found), non_blocking=True)
        self._stream.synchronize()

    def slot(self, number: int) -> memoryview:
        return self.memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def close(self) -> None:
        """Nobody finds it any more, and its memory ends with the last view of it."""
        if self._page_lock is not None:
            self._page_lock.unlock(pointer(self.memory))
        self._shared.free(self.handle)
