"""What Ctrl-C does to a job."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Self


class Interrupts:
    """SIGINT and SIGTERM within the block: the first sets `first`, the second calls `abort` and cancels the
    task that entered the block."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self.first = asyncio.Event()
        self.aborted = False

    def __enter__(self) -> Self:
        self._job = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self) -> None:
        if not self.first.is_set():
            self.first.set()
        elif not self.aborted and self._job is not None:
            self.aborted = True
            self._abort()
            self._job.cancel()
