"""The one connection to another node, and everything that is on its way over it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gyre.actors.bulk import FREIGHT, Freight
from gyre.actors.envelope import Chain, Envelope
from gyre.actors.errors import BadMessage, ExitReason, Failure, LinkLost
from gyre.actors.flow import TAKEN_AT_ONCE, Flows
from gyre.actors.messages import Down, Message, wire_name
from gyre.actors.ref import Ref
from gyre.actors.remote import PendingAsk, PendingStream
from gyre.actors.serving import RemoteAnswer, serve
from gyre.actors.transport import Channel
from gyre.actors.transport.sockets import SocketChannel
from gyre.actors.transport.ucx import UcxChannel
from gyre.actors.wire import (
    MAX_FRAME_BYTES,
    TELL,
    Beat,
    Body,
    Booted,
    Cancel,
    Deadlock,
    Demand,
    End,
    Ended,
    Failed,
    Frame,
    Gone,
    Item,
    Reply,
    Request,
    Seek,
    Shutdown,
    Taken,
    Tie,
    Watch,
)

if TYPE_CHECKING:
    from gyre.actors.local import LocalTarget
    from gyre.actors.node import Node


# Beats in a row without a sign of life after which a peer counts as gone.
MISSED_BEATS = 3


class Link:
    """Dialled or accepted; frames sent before it is open wait. When it is lost, everything on it fails
    with `gone` and it is never used again."""

    def __init__(self, node: Node, peer_id: str, endpoint: str, *, dialled: bool) -> None:
        self.node = node
        self.peer_id = peer_id
        self.peer_name = peer_id[:8]
        self.endpoint = endpoint
        self.dialled = dialled
        self.gone: ExitReason | None = None
        self.opened = asyncio.Event()
        self.far = False
        self.pending: dict[int, PendingAsk | PendingStream] = {}
        self.incoming: dict[int, RemoteAnswer] = {}
        self._channel: Channel | None = None
        self._outbox: list[bytes] = []
        self._sent = 0
        self._received = 0
        self._beaten = (0, 0)
        self._silent = 0
        self._answered = 0  # frames sent when the last beat came
        self.flows = Flows()
        self._taken: dict[int, int] = {}
        self._watched: dict[int, tuple[Ref, dict[int, LocalTarget]]] = {}
        # The dialler's nonce: a bulk connection names by it the link that it belongs to.
        self.session = b""
        self.freight = Freight(self)
        self._held = self.freight.incoming.lanes
        self.unshipped = self.freight.outgoing.unshipped

    # --- sending --------------------------------------------------------------------------------

    def open(self, channel: Channel, peer_name: str) -> None:
        self._channel = channel
        self.far = channel.far
        self.peer_name = peer_name
        channel.limit_bytes = MAX_FRAME_BYTES
        channel.receiver = self
        self.freight.shared.possible = self.shares
        for payload in self._outbox:
            channel.send(payload)
        self._outbox.clear()
        self.opened.set()

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    @property
    def single(self) -> bool:
        """Whether what is being received came alone."""
        return self._channel is not None and self._channel.single

    @property
    def between_processes(self) -> bool:
        return isinstance(self._channel, SocketChannel | UcxChannel)

    @property
    def shares(self) -> bool:
        """Whether its blobs may go through shared memory, should the peer be on this host."""
        return self.between_processes and self.node.shared_memory

    def send(self, frame: Frame) -> None:
        """BadMessage where it cannot be encoded or is too long; nothing where the link is lost."""
        if self.gone is not None:
            return
        frame.seq = self._sent + 1
        codec = self.node.codec
        payload = codec.encode(frame)
        if codec.outgoing:
            payload = self.freight.pack(frame, payload, codec.take_blobs())
        if len(payload) > MAX_FRAME_BYTES:
            raise BadMessage(f"{len(payload)} bytes in one message, {MAX_FRAME_BYTES} allowed: use a Blob")
        self._sent += 1
        if self._channel is not None:
            self._channel.send(payload)
        else:
            self._outbox.append(payload)

    def request(
        self,
        kind: int,
        id: int,
        ref: Ref,
        message: Message,
        current: Envelope | None,
        left_s: float | None,
        position: int = 0,
        encoded: Body | None = None,
    ) -> None:
        sender = incarnation = cause = 0
        chain: Chain = ()
        if current is not None:
            sender, incarnation, cause = current.life.id, current.life.ref.incarnation, current.id
            if kind != TELL:
                chain = current.chain_from_here()
        name = wire_name(type(message))
        body: Any = message if encoded is None else encoded
        self.send(
            Request(0, kind, id, ref.id, sender, incarnation, left_s, cause, position, chain, name, body)
        )
        self.flows.sent(ref.id)

    def cancel(self, id: int) -> None:
        """Nobody waits here any more for what was requested as `id`."""
        self.freight.drop(id)
        self.send(Cancel(0, id))

    def fail(self, id: int, failure: Failure) -> None:
        """Answers an incoming request with an error."""
        if self.incoming.pop(id, None) is None:
            return
        try:
            self.send(Failed(0, id, failure))
        except BadMessage:
            self.send(Failed(0, id, failure.without_fields()))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def beat(self) -> bool:
        """Sends a sign of life where nothing was sent since the last beat. Whether the peer has given one
        within MISSED_BEATS."""
        sent, received = self._beaten
        if sent == self._sent:
            self.send(Beat(0))
        self._silent = self._silent + 1 if received == self._received else 0
        self._beaten = (self._sent, self._received)
        return self._silent <= MISSED_BEATS

    def give_up(self, why: str) -> None:
        """Nobody is there any more."""
        channel = self._channel
        self.lost(why)
        if channel is not None:
            channel.abort()

    # --- room -----------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        return self._channel is None or self._channel.writable

    async def drain(self) -> None:
        if self._channel is not None:
            await self._channel.drain()

    def has_room(self, actor_id: int) -> bool:
        channel = self._channel
        return (channel is None or channel.writable) and self.flows.has_room(actor_id)

    async def room(self, actor_id: int) -> None:
        """Until there is room for one more message to that actor, or the link is lost."""
        while self.gone is None and not self.has_room(actor_id):
            if not self.writable:
                await self.drain()
            else:
                await self.flows.room(actor_id)

    def taken(self, actor_id: int) -> None:
        """A message of this peer has left the mailbox of one of our actors."""
        count = self._taken.get(actor_id, 0) + 1
        self._taken[actor_id] = count
        if count >= TAKEN_AT_ONCE or actor_id not in self.node.lives:
            self.settle(actor_id)

    def settle(self, actor_id: int) -> None:
        count = self._taken.pop(actor_id, 0)
        if count:
            self.send(Taken(0, actor_id, count))

    # --- watching -------------------------------------------------------------------------------

    def watch(self, ref: Ref, watcher: LocalTarget) -> None:
        if ref.id not in self._watched:
            self._watched[ref.id] = (ref, {})
            self.send(Watch(0, ref.id, True))
        self._watched[ref.id][1][watcher.id] = watcher

    def unwatch(self, ref: Ref, watcher: LocalTarget) -> None:
        _, watchers = self._watched.get(ref.id, (ref, {}))
        watchers.pop(watcher.id, None)
        if not watchers and self._watched.pop(ref.id, None) is not None:
            self.send(Watch(0, ref.id, False))

    def watches(self, actor_id: int) -> bool:
        return actor_id in self._watched

    # --- receiving ------------------------------------------------------------------------------

    def received(self, payload: memoryview) -> None:
        if self.gone is not None:
            return  # it would come after what the next connection brings
        frame = self.node.codec.frame(payload)
        self._received += 1
        if frame.seq != self._received:
            raise LinkLost(f"frame {frame.seq} where {self._received} belongs: lost, repeated or replayed")
        if self._held and self.freight.incoming.hold(frame):
            return
        _ON[type(frame)](self, frame)

    def dispatch(self, frame: Frame) -> None:
        """Handles a frame that had to wait."""
        _ON[type(frame)](self, frame)

    def loaded(self, frame: Item, taken: Callable[[], None]) -> bool:
        """Whether the item waits to be taken by its consumer; `taken` is called then."""
        pending = self.pending.get(frame.id)
        return isinstance(pending, PendingStream) and pending.loaded(frame.position, taken)

    def _on_reply(self, frame: Reply) -> None:
        pending = self.pending.pop(frame.id, None)
        if isinstance(pending, PendingAsk):
            pending.reply(frame.body)

    def _on_failed(self, frame: Failed) -> None:
        pending = self.pending.pop(frame.id, None)
        if pending is not None:
            pending.fail(frame.failure)

    def _on_item(self, frame: Item) -> None:
        pending = self.pending.get(frame.id)
        if isinstance(pending, PendingStream):
            pending.item(frame.position, frame.body)

    def _on_end(self, frame: End) -> None:
        pending = self.pending.get(frame.id)
        if isinstance(pending, PendingStream):
            pending.end()

    def _on_cancel(self, frame: Cancel) -> None:
        self.freight.drop(frame.id)
        answer = self.incoming.pop(frame.id, None)
        if answer is not None:
            answer.cancel()

    def _on_taken(self, frame: Taken) -> None:
        self.flows.taken(frame.to, frame.count)

    def _on_demand(self, frame: Demand) -> None:
        sink = self.incoming.get(frame.id)
        if sink is not None:
            sink.credit(frame.count)

    def _on_gone(self, frame: Gone) -> None:
        if self.watches(frame.id):
            self.node.processes.watched(self.peer_id, frame.id)
        self._tell_watchers(frame.id, frame.reason)

    def _on_beat(self, frame: Beat) -> None:
        """Is answered where nothing was sent since the last: the peer may beat faster than this node does. An
        answer finds that its own side has sent, so there is no answer to it."""
        if self._sent == self._answered:
            self.send(Beat(0))
        self._answered = self._sent

    def _on_process(self, frame: Booted | Ended | Shutdown) -> None:
        self.node.processes.received(self.peer_id, frame)

    def _on_watch(self, frame: Watch) -> None:
        life = self.node.life(frame.to)
        if life is None:
            if frame.on:
                self.send(Gone(0, frame.to, self.node.exit_of(frame.to)))
        elif frame.on:
            life.watchers.add(self, lambda down: self.send(Gone(0, down.ref.id, down.reason)))
        else:
            life.watchers.discard(self)

    def _on_tie(self, frame: Tie) -> None:
        life = self.node.lives.get(frame.to)
        if life is None:
            return  # a Gone is on its way
        other = self.node.bind(self.peer_id, self.endpoint, frame.id, frame.name, frame.incarnation)
        if frame.on:
            life.bonds.tied(other)
        else:
            life.bonds.untied(other)

    def _on_seek(self, frame: Seek) -> None:
        answer = self.incoming.get(frame.ask)
        if answer is not None and answer.envelope is not None:
            self.node.waits.sought(answer.envelope, frame)

    def _on_deadlock(self, frame: Deadlock) -> None:
        self.node.waits.found(frame)

    def _tell_watchers(self, actor_id: int, reason: ExitReason) -> None:
        ref, watchers = self._watched.pop(actor_id, (None, {}))
        for watcher in watchers.values():
            if ref is not None:
                watcher.deliver(Down(ref=ref, reason=reason))

    # --- the end --------------------------------------------------------------------------------

    def lost(self, why: str) -> None:
        self._channel = None
        self.node.links.on_lost(self, why)

    def fail_all(self, reason: ExitReason) -> None:
        """The peer is gone: every ask, stream and monitor learns it, every handler it asked for ends."""
        if self.gone is not None:
            return
        self.gone = reason
        self.opened.set()
        pending, self.pending = self.pending, {}
        for waiting in pending.values():
            waiting.fail(Failure(reason=reason))
        incoming, self.incoming = self.incoming, {}
        for answer in incoming.values():
            answer.cancel()
        self.flows.close()
        self.freight.close()
        for life in self.node.lives.values():
            life.watchers.discard(self)
        for actor_id in [*self._watched]:
            self._tell_watchers(actor_id, reason)


def _by_freight(handle: Callable[[Freight, Any], object]) -> Callable[[Link, Any], object]:
    return lambda link, frame: handle(link.freight, frame)


_ON: dict[type[Frame], Callable[[Link, Any], object]] = {
    **{kind: _by_freight(handle) for kind, handle in FREIGHT.items()},
    Request: serve,
    Reply: Link._on_reply,
    Failed: Link._on_failed,
    Item: Link._on_item,
    End: Link._on_end,
    Cancel: Link._on_cancel,
    Taken: Link._on_taken,
    Demand: Link._on_demand,
    Watch: Link._on_watch,
    Gone: Link._on_gone,
    Booted: Link._on_process,
    Ended: Link._on_process,
    Shutdown: Link._on_process,
    Beat: Link._on_beat,
    Tie: Link._on_tie,
    Seek: Link._on_seek,
    Deadlock: Link._on_deadlock,
}
