"""Host memory that a GPU copies from and to by itself: pinned, which takes a second for some GB."""

from __future__ import annotations

from typing import Any

import structlog
import torch

from gyre.rdma import PageLock

log = structlog.get_logger()

# For all GPUs of the process.
_PORTABLE = 1


def page_lock(device: torch.device) -> PageLock | None:
    """For memory that `device` copies to and from; None for the CPU."""
    return CudaPageLock() if device.type == "cuda" else None


class CudaPageLock:
    """By CUDA, for all its devices. Where it cannot, copies are slower, and a line in the log says so."""

    def __init__(self) -> None:
        self._locked: set[int] = set()

    def lock(self, pointer: int, nbytes: int) -> None:
        status = int(_runtime().cudaHostRegister(pointer, nbytes, _PORTABLE))
        if status == 0:
            self._locked.add(pointer)
        else:
            log.warning("memory_not_pinned", nbytes=nbytes, status=status, slower="copies to the GPU")

    def unlock(self, pointer: int) -> None:
        if pointer in self._locked:
            self._locked.discard(pointer)
            _runtime().cudaHostUnregister(pointer)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
