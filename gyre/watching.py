"""Shows a job's status again and again while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

import structlog

from gyre.actors import ActorError
from gyre.schedule.messages import ScheduleStatus

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
