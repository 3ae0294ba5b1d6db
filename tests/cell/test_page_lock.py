"""Pinned memory, with a stand-in for CUDA's driver; on a GPU: GYRE_TEST_DEVICE=cuda."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from gyre.cell.engine.sglang_weights import Thread
from gyre.cell.page_lock import CudaPageLock, page_lock
from gyre.rdma.memory import pointer

ALREADY_REGISTERED = 712


class FakeDriver:
    """Keeps account of what is pinned, and of the contexts of the one thread that calls."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.contexts: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        assert name.startswith("cu"), name
        return lambda *arguments: 0

    def cuDevicePrimaryCtxRetain(self, found: Any, device: ctypes.c_int) -> int:
        found._obj.value = 77
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        assert context.value is not None
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, found: Any) -> int:
        self.contexts.pop()
        return 0

    def cuMemHostRegister_v2(
        self, where: ctypes.c_void_p, nbytes: ctypes.c_size_t, flags: ctypes.c_uint
    ) -> int:
        assert where.value is not None and self.contexts == [77]
        if where.value in self.pinned:
            return ALREADY_REGISTERED
        self.pinned[where.value] = nbytes.value
        return 0

    def cuMemHostUnregister(self, where: ctypes.c_void_p) -> int:
        assert where.value is not None and self.contexts == [77]
        del self.pinned[where.value]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


def test_pages_are_pinned_until_they_are_unlocked_and_the_thread_stays_as_it_was(driver: FakeDriver) -> None:
    lock = CudaPageLock(0)
    lock.lock(4096, 8192)
    assert (driver.pinned, driver.contexts) == ({4096: 8192}, [])
    lock.unlock(4096)
    assert (driver.pinned, driver.contexts) == ({}, [])


def test_what_cannot_be_pinned_is_only_slower(driver: FakeDriver) -> None:
    CudaPageLock(0).lock(4096, 8192)
    lock = CudaPageLock(0)
    with capture_logs() as logs:
        lock.lock(4096, 8192)
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("memory_not_pinned", f"cuMemHostRegister_v2: status {ALREADY_REGISTERED}")
    ]
    lock.unlock(4096)
    assert (driver.pinned, driver.contexts) == ({4096: 8192}, [])


def test_memory_of_the_cpu_is_not_pinned() -> None:
    assert page_lock(torch.device("cpu")) is None


@pytest.mark.skipif(os.environ.get("GYRE_TEST_DEVICE") != "cuda", reason="needs a GPU")
def test_after_a_failure_kernels_run() -> None:
    device = torch.device("cuda", 0)
    memory = mmap.mmap(-1, 2**20)
    at = pointer(memoryview(memory))
    first, second = page_lock(device), page_lock(device)
    assert first is not None and second is not None
    first.lock(at, 2**20)
    with capture_logs() as logs:
        second.lock(at, 2**20)
    assert [line["event"] for line in logs] == ["memory_not_pinned"]
    assert float(torch.ones(3, device=device).sum()) == 3.0
    first.unlock(at)


async def test_the_thread_that_talks_to_a_server_is_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[torch.device, str]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: used.append((device, threading.current_thread().name))
    )
    thread = Thread(torch.device("cuda", 3))
    assert await thread.run(threading.get_ident) != threading.get_ident()
    thread.close()
    assert used == [(torch.device("cuda", 3), "sglang_0")]
