"""Who sees how an actor ends."""

from __future__ import annotations

import asyncio

from gyre.actors import Actor, Down, ExitReason, Ref, handles


class Witness(Actor):
    """Monitors an actor, so that its death is told and not the node's failure."""

    def __init__(self, of: Ref) -> None:
        self._of = of
        self.reason: asyncio.Future[ExitReason] = asyncio.get_running_loop().create_future()

    async def started(self) -> None:
        self.context.monitor(self._of)

    @handles(Down)
    async def down(self, message: Down) -> None:
        self.reason.set_result(message.reason)
