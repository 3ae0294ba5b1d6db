"""The rendezvous store of all process groups: in a process of its own, outside all ranks."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import msgspec

from gyre.actors import Actor, ActorDied, Ask, AwaitChild, LinkLost, Ref, handles
from gyre.cell.worker_messages import BuildGroup

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`host` is the address that it listens at."""

    host: str = "127.0.0.1"


class StoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank connects."""

    host: str
    port: int


class GetStoreAddress(Ask[StoreAddress], frozen=True, kw_only=True):
    """To the StoreActor. A store that was restarted has another port."""


class StoreActor(Actor):
    """Serves one `TCPStore`; its groups are told apart by a prefix of {cell, incarnation, generation}."""

    def __init__(self, config: StoreConfig) -> None:
        self._host = config.host
        self._opening: asyncio.Task[TCPStore]

    async def started(self) -> None:
        # Not awaited: cells start beside it, and importing torch takes seconds.
        self._opening = self.context.run(asyncio.to_thread(self._open), name="open")

    @handles(GetStoreAddress, concurrent=True)
    async def address(self, message: GetStoreAddress) -> StoreAddress:
        store = await asyncio.shield(self._opening)
        return StoreAddress(host=self._host, port=store.port)

    def _open(self) -> TCPStore:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # Only this machine's ranks come here, and it asks nobody for a token.
        listening = socket.create_server((self._host, 0))
        port = listening.getsockname()[1]
        descriptor = listening.detach()
        return TCPStore(self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


class Rendezvous:
    """Where the next group of one cell's ranks meets. Outlives the store: `stores`, its supervisor, starts it
    anew."""

    def __init__(self, stores: Ref, life: str, timeout_s: float) -> None:
        self._stores = stores
        self._life = life
        self._timeout_s = timeout_s
        self._generation = 0

    async def next_group(self) -> BuildGroup:
        """Under a prefix that no group had before. Waits while the store is down."""
        address = await self._store()
        self._generation += 1
        prefix = f"{self._life}/group{self._generation}"
        return BuildGroup(host=address.host, port=address.port, prefix=prefix)

    async def _store(self) -> StoreAddress:
        dead: Ref | None = None
        async with asyncio.timeout(self._timeout_s):
            while True:
                living = AwaitChild(name="store", after=dead)
                store = await self._stores.ask(living, timeout_s=self._timeout_s)
                try:
                    return await store.ask(GetStoreAddress(), timeout_s=self._timeout_s)
                except (ActorDied, LinkLost):
                    dead = store
