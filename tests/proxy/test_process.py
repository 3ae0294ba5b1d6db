from __future__ import annotations

import asyncio

from gyre.actors import Actor, ChildSpec, Node, handles
from gyre.proxy.messages import Happened
from gyre.proxy.process import Events


class Keeper(Actor):
    def __init__(self, heard: asyncio.Queue[Happened]) -> None:
        self._heard = heard

    @handles(Happened)
    async def happened(self, message: Happened) -> None:
        await self._heard.put(message)


async def test_what_any_thread_logs_is_told_to_the_keeper_at_once() -> None:
    heard: asyncio.Queue[Happened] = asyncio.Queue()
    async with Node("test") as node:
        keeper = await node.spawn(ChildSpec(name="keeper", start=lambda: Keeper(heard)))
        events = Events()
        telling = asyncio.create_task(events.tell(keeper))
        await asyncio.sleep(0)  # it waits for the first
        await asyncio.to_thread(events, None, "warning", {"event": "read", "bytes": 3})
        assert await heard.get() == Happened(level="warning", event="read", fields={"bytes": 3})
        events(None, "info", {"event": "asked"})
        await events.told()
        assert (await heard.get()).event == "asked"
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
