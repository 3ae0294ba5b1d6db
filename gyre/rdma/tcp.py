"""Between hosts, over TCP: bytes go from where they are to where they belong, on several connections."""

from __future__ import annotations

import asyncio

from gyre.rdma.exchange import Exchange, Transfer
from gyre.rdma.frames import Begin, Done, Go
from gyre.rdma.lane import Lane
from gyre.rdma.memory import Registered
from gyre.rdma.stages import expect

CONNECTIONS = 4


class TcpBackend(Exchange):
    """Peers must hold `token`; bytes travel in the clear. `where`: an address of this machine."""

    name = "tcp"

    def __init__(self, where: str, token: bytes, connections: int = CONNECTIONS) -> None:
        super().__init__(where, token)
        self.stripes = connections

    async def _attach(self, region: Registered) -> None:
        """Memory is memory."""

    async def _detach(self, region: Registered) -> None:
        pass

    async def _move(self, lane: Lane, transfer: Transfer) -> None:
        views = [transfer.local.view(extent.local, extent.nbytes) for extent in transfer.extents]
        if transfer.op == "read":
            await lane.receive_bytes(views)
        else:
            await lane.send_bytes(views)
            expect(await lane.receive(), Done)

    async def _serve(self, lane: Lane, begin: Begin, region: Registered) -> None:
        views = [region.view(offset, nbytes) for offset, nbytes in begin.pieces]
        # Whoever began has given up by then, and may not have been able to say so.
        async with asyncio.timeout(begin.timeout_s):
            await lane.send(Go())
            if begin.op == "read":
                await lane.send_bytes(views)
            else:
                await lane.receive_bytes(views)
                await lane.send(Done())
