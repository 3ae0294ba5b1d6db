"""The nodes that one node knows, and what it is to them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gyre.actors.desk import FIND_TIMEOUT_S, Desk, Find, Meet
from gyre.actors.errors import ActorError
from gyre.actors.handshake import Peer
from gyre.actors.life import Life
from gyre.actors.names import Names
from gyre.actors.ref import DESK, Ref
from gyre.actors.specs import MAILBOX

if TYPE_CHECKING:
    from gyre.actors.node import Node


class Neighbours:
    """By their desks. The own desk is made when first asked for."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._known: dict[str, Ref] = {}
        self._closed = False
        self.names = Names()

    def desk(self) -> Life | None:
        """None when this node is about to end."""
        node = self._node
        life = node.lives.get(DESK)
        if life is None and not self._closed:
            life = node.context.run(Life, node, Desk(), node.name, 1, MAILBOX, id=DESK)
            node.lives[DESK] = life
            life.begin()
        return life

    def desk_of(self, peer: Peer) -> Ref:
        return self._node.bind(peer.node_id, peer.endpoint, DESK, peer.name, 1)

    def meet(self, desk: Ref) -> None:
        """A node that names are looked up at."""
        self._known[desk.node_id] = desk

    def forget(self, node_id: str) -> None:
        self._known.pop(node_id, None)

    async def reach(self, endpoint: str) -> Ref:
        node = self._node
        await node.listen()
        link = await node.links.reach(endpoint)
        desk = self.desk_of(Peer(link.peer_id, link.peer_name, link.endpoint))
        own = self.desk()
        if own is not None:
            await desk.ask(Meet(node=own.ref))
        self.meet(desk)
        return desk

    async def find(self, name: str, seen: tuple[str, ...] = ()) -> Ref | None:
        """Here, then at each node that is known and not in `seen`."""
        node = self._node
        found = self.names.get(name) or node.lookup(name)
        if found is not None:
            return found
        others = {id: desk for id, desk in self._known.items() if id not in seen}
        seen = (*seen, node.id, *others)
        for desk in others.values():
            try:
                found = await desk.ask(Find(name=name, seen=seen), timeout_s=FIND_TIMEOUT_S)
            except ActorError:
                continue  # it is gone, or as good as
            if found is not None:
                return found
        return None

    async def close(self) -> None:
        """What the desk runs for others goes."""
        self._closed = True
        desk = self._node.lives.get(DESK)
        if desk is not None:
            desk.request_stop()
            await asyncio.wait([desk.ended])
