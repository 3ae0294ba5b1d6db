"""Host memory that a GPU copies from and to by itself: pinned, which takes a second for some GB."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property

import structlog
import torch

from gyre.rdma import PageLock
from gyre.rdma.cuda_driver import HostPages

log = structlog.get_logger()


def page_lock(device: torch.device) -> PageLock | None:
    """For memory that `device` copies to and from; None for the CPU."""
    return CudaPageLock(device.index or 0) if device.type == "cuda" else None


class CudaPageLock:
    """By CUDA, for all its devices. Where it cannot, copies are slower, and a line in the log says so."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._locked: set[int] = set()

    def lock(self, pointer: int, nbytes: int) -> None:
        try:
            self._pages.lock(pointer, nbytes)
        except OSError as error:
            log.warning("memory_not_pinned", nbytes=nbytes, reason=str(error), slower="copies to the GPU")
        else:
            self._locked.add(pointer)

    def unlock(self, pointer: int) -> None:
        if pointer in self._locked:
            self._locked.discard(pointer)
            # Of a GPU that has failed nothing can be undone.
            with suppress(OSError):
                self._pages.unlock(pointer)

    @cached_property
    def _pages(self) -> HostPages:
        return HostPages(self._device)
