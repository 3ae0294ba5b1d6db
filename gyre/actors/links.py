"""The links of a node: dialled when first needed, accepted when called, one to each peer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from gyre.actors.caller import Caller
from gyre.actors.errors import ExitReason, LinkLost
from gyre.actors.handshake import Crossed, DiallerHandshake, HandshakeFailed, ListenerHandshake, Peer, verdict
from gyre.actors.link import MISSED_BEATS, Link
from gyre.actors.log import log
from gyre.actors.ref import Ref
from gyre.actors.transport import CLOSED, Channel

if TYPE_CHECKING:
    from gyre.actors.node import Node

# A peer may be busy on its loop for a while.
HANDSHAKE_TIMEOUT_S = 30.0
# A connection that both dialled is there by then.
CROSSED_WAIT_S = 1.0


class Links:
    """By peer. Of a peer whose process is known to be over the reason stays, for those who ask its actors."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._links: dict[str, Link] = {}
        self._over: dict[str, ExitReason] = {}
        self._dialling: set[asyncio.Task[None]] = set()
        self._greeting: dict[Channel, None] = {}
        self._heart: asyncio.TimerHandle | None = None

    def get(self, node_id: str) -> Link | None:
        return self._links.get(node_id)

    def all(self) -> list[Link]:
        return [*self._links.values()]

    def to(self, ref: Ref) -> Link:
        return self._links.get(ref.node_id) or self.connect(ref.node_id, ref.endpoint)

    def connect(self, node_id: str, endpoint: str) -> Link:
        """The link to a node, at once; frames wait in it until it is open."""
        link = self._links.get(node_id)
        if link is None:
            link = Link(self._node, node_id, endpoint, dialled=True)
            if node_id in self._over:
                link.gone = self._over[node_id]
                return link
            self._links[node_id] = link
            task = self._node.loop.create_task(
                self._dial(link), name=f"dial {endpoint}", context=self._node.context
            )
            self._dialling.add(task)
            task.add_done_callback(self._dialling.discard)
        return link

    def on_lost(self, link: Link, why: str) -> None:
        """Its channel has ended. What is known of the peer's process says more than that."""
        if link.gone is not None:
            return
        explained = self._node.processes.link_lost(link.peer_id)
        if not explained or why != CLOSED:
            log.info("link_lost", node=self._node.name, peer=link.peer_name, why=why)
        if not explained:
            self._end(link, ExitReason(kind="lost", message=why))

    def peer_over(self, node_id: str, reason: ExitReason) -> None:
        """The peer's process has ended."""
        self._over[node_id] = reason
        while len(self._over) > 1024:
            del self._over[next(iter(self._over))]
        link = self._links.get(node_id)
        if link is not None:
            self._end(link, reason)
            link.close()

    def accept(self, channel: Channel) -> _Greeting:
        self._greeting[channel] = None
        return _Greeting(self, channel)

    def opened(self, link: Link, channel: Channel, peer_name: str) -> None:
        """The handshake is over."""
        link.open(channel, peer_name)
        if link.far and self._heart is None:
            self._heart = self._node.loop.call_later(self._node.heartbeat_s, self._beat)

    def _beat(self) -> None:
        far = [link for link in self.all() if link.far and link.is_open]
        window_s = self._node.heartbeat_s * (MISSED_BEATS + 1)
        for link in far:
            if not link.beat():
                link.give_up(f"no sign of life for {window_s:g} s")
        self._heart = self._node.loop.call_later(self._node.heartbeat_s, self._beat) if far else None

    def close(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
        for task in self._dialling:
            task.cancel()
        for link in self.all():
            self._end(link, ExitReason(kind="stopped", message="this node is closed"))
            link.close()
        for channel in [*self._greeting]:
            channel.close()

    def _end(self, link: Link, reason: ExitReason) -> None:
        if self._links.get(link.peer_id) is link:
            del self._links[link.peer_id]
            self._node.neighbours.forget(link.peer_id)
        link.fail_all(reason)

    # --- dialling -------------------------------------------------------------------------------

    async def reach(self, endpoint: str) -> Link:
        """The link to whoever listens there, open. LinkLost."""
        link = ours = Link(self._node, "", endpoint, dialled=True)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                try:
                    await self._greet(ours)
                except Crossed:  # there is one
                    link = self._links.get(ours.peer_id, ours)
                    await link.opened.wait()
        except TimeoutError:
            raise LinkLost(f"{endpoint} did not answer") from None
        finally:
            # Whatever ended this, nobody must wait on a link that will never open.
            if self._links.get(ours.peer_id) is ours and not ours.is_open:
                self.on_lost(ours, f"{endpoint} was not reached")
        if link.gone is not None:
            raise LinkLost(str(link.gone))
        return link

    def met(self, link: Link, peer: Peer) -> None:
        """The listener has proved itself. Where the link was to any node, it is to this one: Crossed where
        there is a link to it."""
        if link.peer_id:
            if link.peer_id != peer.node_id:
                raise HandshakeFailed("another node answers there")
            return
        if peer.node_id == self._node.id:
            raise HandshakeFailed("it is this node itself")
        link.peer_id, link.endpoint = peer.node_id, peer.endpoint
        if self._links.setdefault(peer.node_id, link) is not link:
            raise Crossed("there is a link to it")

    async def _dial(self, link: Link) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                while not link.opened.is_set():
                    await self._greet_or_meet(link)
        except TimeoutError:
            self.on_lost(link, f"{link.endpoint} did not answer")
        except LinkLost as error:
            if not link.is_open:
                self.on_lost(link, str(error))

    async def _greet_or_meet(self, link: Link) -> None:
        try:
            await self._greet(link)
        except Crossed:
            # The peer's own connection may be one whose end it has not noticed yet.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CROSSED_WAIT_S):
                    await link.opened.wait()

    async def _greet(self, link: Link) -> None:
        link.session = self._node.nonce()
        handshake = DiallerHandshake(self._node.token, self._node.peer, link.session)
        dialling = _Dialling(self, link, handshake)
        channel = await self._node.dial(link.endpoint, dialling)
        dialling.channel = channel
        try:
            channel.send(handshake.hello())
            await dialling.done
        finally:
            if channel.receiver is dialling:
                channel.close()

    # --- accepting ------------------------------------------------------------------------------

    def greeted(self, channel: Channel, peer: Peer, session: bytes) -> bool:
        """Whether the connection of an authenticated peer becomes the link to it."""
        link = self._links.get(peer.node_id)
        if link is not None and link.dialled and self._node.id < peer.node_id:
            return False
        if link is not None and link.is_open:
            self._end(link, ExitReason(kind="lost", message="the peer made a new connection"))
            link.close()
            link = None
        if link is None:
            link = self._links[peer.node_id] = Link(self._node, peer.node_id, peer.endpoint, dialled=False)
        link.dialled = False
        link.session = session
        channel.send(verdict("welcome"))
        self.opened(link, channel, peer.name)
        return True

    def greeted_bulk(self, channel: Channel, peer: Peer, session: bytes) -> None:
        """The connection of an authenticated peer carries the blobs of the link to it. HandshakeFailed where
        there is no such link."""
        link = self._links.get(peer.node_id)
        if (
            link is None
            or not link.is_open
            or link.dialled
            or link.session != session
            or link.freight.attached
        ):
            raise HandshakeFailed("it belongs to no connection here")
        channel.send(verdict("welcome"))
        link.freight.attach(channel)

    def greeting_over(self, channel: Channel, why: str = "") -> None:
        self._greeting.pop(channel, None)
        if why:
            log.warning("peer_refused", node=self._node.name, why=why)


class _Dialling(Caller):
    """Receives the listener's side of the handshake."""

    def __init__(self, links: Links, link: Link, handshake: DiallerHandshake) -> None:
        super().__init__(link.node.loop)
        self._links = links
        self.channel: Channel | None = None
        self._link = link
        self._handshake = handshake
        self._met = False

    def received(self, payload: memoryview) -> None:
        try:
            if self.channel is None:
                raise HandshakeFailed("it spoke first")
            if not self._met:
                proof = self._handshake.on_hello(payload)
                self._links.met(self._link, self._handshake.peer)
                self.channel.send(proof)
                self._met = True
                return
            self._handshake.on_verdict(payload)
        except LinkLost as error:
            if self.channel is not None and not self._met:
                crossed = isinstance(error, Crossed)
                self.channel.send(verdict("crossed") if crossed else verdict("refused", str(error)))
            self.finish(error)
            raise
        if self._link.is_open or self._link.gone is not None:
            self.finish(Crossed("the peer was faster"))
            return
        self._links.opened(self._link, self.channel, self._handshake.peer.name)
        self.finish(None)


class _Greeting:
    """Receives the dialler's side of the handshake."""

    def __init__(self, links: Links, channel: Channel) -> None:
        node = links._node
        self._links = links
        self._channel = channel
        self._handshake = ListenerHandshake(node.token, node.peer, node.nonce())
        self._met = False
        self._timer = node.loop.call_later(HANDSHAKE_TIMEOUT_S, channel.close)

    def received(self, payload: memoryview) -> None:
        try:
            if not self._met:
                self._channel.send(self._handshake.on_hello(payload))
                self._met = True
                return
            self._handshake.on_proof(payload)
            theirs = self._handshake.theirs
            if theirs.session:
                self._links.greeted_bulk(self._channel, theirs.peer, theirs.session)
        except Crossed:
            self._links.greeting_over(self._channel)
            raise
        except HandshakeFailed as error:
            self._channel.send(verdict("refused", str(error)))
            raise
        self._timer.cancel()
        self._links.greeting_over(self._channel)
        if not theirs.session and not self._links.greeted(self._channel, theirs.peer, theirs.nonce):
            self._channel.send(verdict("crossed"))
            self._channel.close()

    def lost(self, why: str) -> None:
        self._timer.cancel()
        if self._channel in self._links._greeting:
            self._links.greeting_over(self._channel, why)
