from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from typing import Any

import pytest

from gyre.rdma import Extent, Look
from gyre.rdma.copying import Copier


async def test_of_copies_that_fail_together_one_error_is_told_and_none_is_lost() -> None:
    loop, unheard = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda loop, context: unheard.append(context))
    here, there = ctypes.create_string_buffer(8192), ctypes.create_string_buffer(8192)
    # More pieces than one step has.
    extents = [Extent(at, at, 8) for at in range(0, 8192, 8)]
    later = threading.Event()

    def look(at: int) -> None:
        if at >= 4096:
            later.wait(10.0)
        raise RuntimeError(f"at {at}")

    copier = Copier("test")
    try:
        copying = asyncio.create_task(
            copier.copy("read", *map(ctypes.addressof, (here, there)), extents, None, Look(8, look))
        )
        loop.call_later(0.05, later.set)
        with pytest.raises(RuntimeError, match="at 0"):
            await copying
    finally:
        later.set()
        copier.close()
    del copying
    gc.collect()
    assert unheard == []
