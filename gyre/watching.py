"""What people look at while a job runs: opens what the job file asks for, and shows it the status."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Self

import msgspec
import structlog

from gyre.actors import ActorError
from gyre.job import Job, warnings
from gyre.schedule.messages import ScheduleStatus
from gyre.watch import MetricsServer, TerminalView, configure_logging, open_tracker

log = structlog.get_logger()


class Watching:
    """`async with Watching(status, show, refresh_s)`: a task that ends with the block; with nothing to show
    to, none."""

    def __init__(
        self,
        status: Callable[[], Awaitable[ScheduleStatus]],
        show: Sequence[Callable[[ScheduleStatus], None]],
        refresh_s: float,
    ) -> None:
        self._status = status
        self._show = show
        self._refresh_s = refresh_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._show:
            self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                status = await self._status()
                for show in self._show:
                    show(status)
            except ActorError as error:
                log.debug("status_unanswered", reason=str(error))
            await asyncio.sleep(self._refresh_s)


def open_watch(job: Job, stack: ExitStack) -> list[Callable[[ScheduleStatus], None]]:
    """Opens the sinks that the job file asks for, until the stack is left. Returns what is to be shown the
    status again and again."""
    terminal = sys.stderr.isatty()
    events = configure_logging(job.run_dir, terminal, job.name)
    stack.callback(events.close)
    for fault in warnings(job):
        log.warning("unlikely_job", fault=str(fault))
    show: list[Callable[[ScheduleStatus], None]] = []
    if job.watch.tracker != "none":
        events.add(
            open_tracker(job.watch.tracker, job.run_dir, job.name, msgspec.to_builtins(job, enc_hook=str))
        )
    if job.watch.prometheus_port:
        server = MetricsServer(job.watch.prometheus_port)
        events.add(server)
        show.append(server.update)
    if terminal:
        view = stack.enter_context(TerminalView(job.name, job.cells.capacity_executions))
        events.add(view)
        show.append(view.update)
    return show
