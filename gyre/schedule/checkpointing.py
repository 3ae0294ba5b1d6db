"""When the core writes checkpoints: beside the orders, one at a time, each step once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from gyre.actors import ActorError, Ref
from gyre.cell.messages import SaveCheckpoint

log = structlog.get_logger()


class Checkpointing:
    """`saved` is the step of the newest checkpoint that is known, `folder` where it is if it is of this life
    of the job."""

    def __init__(self, *, every_steps: int, saved: int | None, timeout_s: float) -> None:
        self._every_steps = every_steps
        self.saved = saved
        self._timeout_s = timeout_s
        self._due = asyncio.Event()
        self._saving = asyncio.Lock()
        self.folder: str | None = None

    def step_done(self, step: int) -> None:
        """`step` steps are complete."""
        if self._every_steps and step % self._every_steps == 0:
            self._due.set()

    async def run(self, core: Callable[[], Ref | None], step: Callable[[], int]) -> None:
        """Writes those that are due, for ever."""
        while True:
            await self._due.wait()
            self._due.clear()
            await self.save(core(), step())

    async def save(self, core: Ref | None, step: int) -> None:
        """Of `step` complete steps, unless there is one. A failure (a full disk) is an event, nothing more:
        the next one is tried when it is due."""
        async with self._saving:
            if self.saved == step or core is None:
                return
            began = asyncio.get_running_loop().time()
            try:
                self.folder = await core.ask(SaveCheckpoint(), timeout_s=self._timeout_s)
            except ActorError as error:
                log.error("checkpoint_failed", step=step, reason=str(error))
                return
            self.saved = step
            seconds = round(asyncio.get_running_loop().time() - began, 4)
            log.info("checkpoint", step=step, folder=self.folder, seconds=seconds)
