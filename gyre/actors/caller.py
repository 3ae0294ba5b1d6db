"""What every dialling of a node waits for."""

from __future__ import annotations

import asyncio

from gyre.actors.errors import LinkLost


class Caller:
    """A receiver whose handshake ends once: `done` resolves, or raises the LinkLost."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()

    def lost(self, why: str) -> None:
        self.finish(LinkLost(why))

    def finish(self, error: LinkLost | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
