"""An event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from gyre.rdma.loop_thread import LoopThread


@pytest.fixture
async def thread() -> AsyncIterator[LoopThread]:
    made = LoopThread("there")
    yield made
    await made.close()
    assert "there" not in {one.name for one in threading.enumerate()}


async def test_work_is_done_in_the_thread(thread: LoopThread) -> None:
    async def name() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert await thread.run(name()) == "there"
    assert threading.current_thread().name != "there"


async def test_errors_come_back(thread: LoopThread) -> None:
    async def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await thread.run(fail())


async def test_who_is_cancelled_waits_until_the_work_is_over(thread: LoopThread) -> None:
    begun, over = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            over.set()

    task = asyncio.create_task(thread.run(work()))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert over.is_set()


async def test_what_is_cancelled_there_is_cancelled_here(thread: LoopThread) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await thread.run(cancelled())
