"""The blobs of one link, both ways, and its bulk connection, made when first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from gyre.actors.blob import Blob
from gyre.actors.bulk.incoming import Incoming
from gyre.actors.bulk.outgoing import Outgoing, SharedMemory
from gyre.actors.bulk.pieces import Pieces, pieces_over
from gyre.actors.caller import Caller
from gyre.actors.errors import BadMessage, LinkLost
from gyre.actors.handshake import DiallerHandshake, HandshakeFailed
from gyre.actors.transport import Channel
from gyre.actors.wire import (
    MAX_FRAME_BYTES,
    Back,
    Bulk,
    Frame,
    Item,
    Laden,
    Landed,
    Loaded,
    Reply,
    Request,
    Share,
    Shared,
    Unshare,
    Want,
)

if TYPE_CHECKING:
    from gyre.actors.link import Link

DIAL_TIMEOUT_S = 30.0
# From the end of the bulk connection to that of its link. A peer that closes closes both, and what it said
# last on the other is still to be heard.
LOST_GRACE_S = 0.1


class Freight:
    """Whoever dialled the link dials its bulk connection too, of its own or when the peer asks for it, and
    says when it stands: so there is one, and nothing is sent on it before both are ready."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.incoming = Incoming(link)
        self.shared = SharedMemory(link)
        self.outgoing = Outgoing(link, self.shared, self._connect)
        self._pieces: Pieces | None = None
        self._standing: asyncio.Future[Pieces] | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._lost: asyncio.TimerHandle | None = None

    def pack(self, frame: Frame, payload: bytes, blobs: list[Blob]) -> bytes:
        """A frame in which Blobs were found. BadMessage where they cannot travel."""
        if not isinstance(frame, Request | Reply | Item):
            raise BadMessage(f"a Blob cannot travel in a {type(frame).__name__}")
        parcels = self.outgoing.pack(frame.id, blobs)
        laden = self._link.node.codec.encode(Laden(frame.seq, parcels, msgspec.Raw(payload)))
        if len(laden) > MAX_FRAME_BYTES:  # its sender is told
            self.outgoing.drop(frame.id)
        return laden

    def drop(self, message: int) -> None:
        """Nobody waits for that message, or for its answer, any more."""
        self.outgoing.drop(message)
        self.incoming.drop(message)

    def lost(self, why: str) -> None:
        """The bulk connection has ended, or cannot be made: so does the link, in a moment."""
        if self._link.gone is None and self._lost is None:
            self._lost = self._link.node.loop.call_later(
                LOST_GRACE_S, self._link.give_up, f"bulk connection: {why}"
            )

    def close(self) -> None:
        """The link is lost."""
        if self._lost is not None:
            self._lost.cancel()
        self.outgoing.close()
        self.shared.close()
        self.incoming.close()
        if self._dialling is not None:
            self._dialling.cancel()
        if self._standing is not None:
            self._standing.cancel()
        if self._pieces is not None:
            self._pieces.close()

    # --- the bulk connection ----------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        return self._pieces is not None

    def attach(self, channel: Channel) -> None:
        """A channel whose handshake is over."""
        self._pieces = pieces_over(channel, self.incoming)

    def on_bulk(self) -> None:
        """The peer needs the connection, or says that it stands. LinkLost where it does not."""
        if self._link.dialled:
            if self._dialling is None:
                self._dial()
            elif self._pieces is not None:
                self._link.send(Bulk(0))
        elif self._pieces is None:
            raise LinkLost("a bulk connection that was not made")
        else:
            self._stands(self._pieces)

    async def _connect(self) -> Pieces:
        if self._standing is None:
            self._standing = self._link.node.loop.create_future()
            if not self._link.dialled:
                self._link.send(Bulk(0))
            elif self._pieces is not None:
                self._stands(self._pieces)
            elif self._dialling is None:
                self._dial()
        return await asyncio.shield(self._standing)

    def _stands(self, pieces: Pieces) -> None:
        if self._standing is None:
            self._standing = self._link.node.loop.create_future()
        if not self._standing.done():
            self._standing.set_result(pieces)

    def _dial(self) -> None:
        node = self._link.node
        self._dialling = node.loop.create_task(
            self._make(), name=f"dial {self._link.endpoint}", context=node.context
        )

    async def _make(self) -> None:
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                channel = await _call(self._link)
        except TimeoutError:
            self.lost("no answer")
        except LinkLost as error:
            self.lost(str(error))
        else:
            self.attach(channel)
            assert self._pieces is not None
            self._stands(self._pieces)
            self._link.send(Bulk(0))


async def _call(link: Link) -> Channel:
    """A channel to the link's peer on which both have proved themselves. LinkLost."""
    node = link.node
    caller = _Caller(link, DiallerHandshake(node.token, node.peer, node.nonce(), link.session))
    channel = caller.channel = await node.dial(link.endpoint, caller)
    try:
        channel.send(caller.handshake.hello())
        await caller.done
    except BaseException:
        channel.close()
        raise
    return channel


class _Caller(Caller):
    """Receives the listener's side of the handshake."""

    def __init__(self, link: Link, handshake: DiallerHandshake) -> None:
        super().__init__(link.node.loop)
        self._link = link
        self._met = False
        self.handshake = handshake
        self.channel: Channel

    def received(self, payload: memoryview) -> None:
        try:
            if self._met:
                self.handshake.on_verdict(payload)
                self.finish(None)
                return
            proof = self.handshake.on_hello(payload)
            if self.handshake.peer.node_id != self._link.peer_id:
                raise HandshakeFailed("another node answers there")
        except LinkLost as error:
            self.finish(error)
            raise
        self._met = True
        self.channel.send(proof)


# What is done with the frames that are about blobs.
FREIGHT: dict[type[Frame], Callable[[Freight, Any], object]] = {
    Laden: lambda freight, frame: freight.incoming.laden(frame),
    Want: lambda freight, frame: freight.outgoing.want(frame.first, frame.count),
    Loaded: lambda freight, frame: freight.incoming.loaded(frame),
    Landed: lambda freight, frame: freight.outgoing.landed(frame.blob),
    Share: lambda freight, frame: freight.incoming.share(frame),
    Shared: lambda freight, frame: freight.shared.opened(frame.id, frame.ok),
    Back: lambda freight, frame: freight.shared.back(frame.id),
    Unshare: lambda freight, frame: freight.incoming.unshare(frame.id),
    Bulk: lambda freight, frame: freight.on_bulk(),
}
