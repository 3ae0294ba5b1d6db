"""The one connection to another node, and everything that is on its way over it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from gyre.actors.envelope import Envelope
from gyre.actors.errors import BadMessage, ExitReason, Failure, LinkLost, UnhandledMessage, WouldDeadlock
from gyre.actors.messages import Down, Message, wire_name
from gyre.actors.ref import Ref
from gyre.actors.remote import ASK, STREAM, TELL, PendingAsk, PendingStream
from gyre.actors.serving import RemoteAnswer, RemoteSink
from gyre.actors.transport import Channel
from gyre.actors.wire import (
    MAX_FRAME_BYTES,
    Booted,
    Cancel,
    Demand,
    End,
    Ended,
    Failed,
    Frame,
    Gone,
    Item,
    Reply,
    Request,
    Shutdown,
    Taken,
    Watch,
)

if TYPE_CHECKING:
    from gyre.actors.life import Life
    from gyre.actors.node import Node

# Messages that may be on their way to one actor, or wait in its mailbox, from one peer.
CREDIT = 1024
TAKEN_AT_ONCE = 256


class _Flow:
    """What was sent to one actor and has not left its mailbox, as far as is known here."""

    __slots__ = ("in_flight", "writers")

    def __init__(self) -> None:
        self.in_flight = 0
        self.writers: deque[asyncio.Future[None]] = deque()


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
        self.pending: dict[int, PendingAsk | PendingStream] = {}
        self.incoming: dict[int, RemoteAnswer] = {}
        self._channel: Channel | None = None
        self._outbox: list[bytes] = []
        self._sent = 0
        self._received = 0
        self._flows: dict[int, _Flow] = {}
        self._taken: dict[int, int] = {}
        self._watched: dict[int, tuple[Ref, dict[int, Life]]] = {}

    # --- sending --------------------------------------------------------------------------------

    def open(self, channel: Channel, peer_name: str) -> None:
        self._channel = channel
        self.peer_name = peer_name
        channel.limit_bytes = MAX_FRAME_BYTES
        channel.receiver = self
        for payload in self._outbox:
            channel.send(payload)
        self._outbox.clear()
        self.opened.set()

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    def send(self, frame: Frame) -> None:
        """BadMessage where it cannot be encoded or is too long; nothing where the link is lost."""
        if self.gone is not None:
            return
        frame.seq = self._sent + 1
        payload = self.node.codec.encode(frame)
        if len(payload) > MAX_FRAME_BYTES:
            raise BadMessage(f"{len(payload)} bytes in one message, {MAX_FRAME_BYTES} allowed: use a region")
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
        pending: PendingAsk | PendingStream | None,
    ) -> None:
        sender, incarnation, cause = (0, 0, 0)
        chain = ()
        if current is not None:
            sender, incarnation, cause = current.life.id, current.life.ref.incarnation, current.id
            if kind != TELL:
                chain = current.chain_from_here()  # type: ignore[assignment]
        name = wire_name(type(message))
        body: Any = message
        self.send(Request(0, kind, id, ref.id, sender, incarnation, left_s, cause, 0, chain, name, body))
        self._flow(ref.id).in_flight += 1
        if pending is not None:
            self.pending[id] = pending

    def cancel(self, id: int) -> None:
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

    # --- room -----------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        return self._channel is None or self._channel.writable

    async def drain(self) -> None:
        if self._channel is not None:
            await self._channel.drain()

    def has_room(self, actor_id: int) -> bool:
        flow = self._flows.get(actor_id)
        return self.writable and (flow is None or flow.in_flight < CREDIT)

    async def room(self, actor_id: int) -> None:
        """Until there is room for one more message to that actor, or the link is lost."""
        while self.gone is None and not self.has_room(actor_id):
            if not self.writable:
                await self.drain()
                continue
            writer = self.node.loop.create_future()
            flow = self._flow(actor_id)
            flow.writers.append(writer)
            try:
                await writer
            except asyncio.CancelledError:
                _wake_next(flow)
                raise

    def _flow(self, actor_id: int) -> _Flow:
        flow = self._flows.get(actor_id)
        if flow is None:
            flow = self._flows[actor_id] = _Flow()
        return flow

    def taken(self, actor_id: int) -> None:
        """A message of this peer has left the mailbox of one of our actors."""
        count = self._taken.get(actor_id, 0) + 1
        self._taken[actor_id] = count
        if count >= TAKEN_AT_ONCE:
            self.settle(actor_id)

    def settle(self, actor_id: int) -> None:
        count = self._taken.pop(actor_id, 0)
        if count:
            self.send(Taken(0, actor_id, count))

    # --- watching -------------------------------------------------------------------------------

    def watch(self, ref: Ref, watcher: Life) -> None:
        if ref.id not in self._watched:
            self._watched[ref.id] = (ref, {})
            self.send(Watch(0, ref.id, True))
        self._watched[ref.id][1][watcher.id] = watcher

    def unwatch(self, ref: Ref, watcher: Life) -> None:
        _, watchers = self._watched.get(ref.id, (ref, {}))
        watchers.pop(watcher.id, None)
        if not watchers and self._watched.pop(ref.id, None) is not None:
            self.send(Watch(0, ref.id, False))

    def watches(self, actor_id: int) -> bool:
        return actor_id in self._watched

    # --- receiving ------------------------------------------------------------------------------

    def received(self, payload: memoryview) -> None:
        frame = self.node.codec.frame(payload)
        self._received += 1
        if frame.seq != self._received:
            raise LinkLost(f"frame {frame.seq} where {self._received} belongs: lost, repeated or replayed")
        match frame:
            case Reply():
                pending = self.pending.pop(frame.id, None)
                if isinstance(pending, PendingAsk):
                    pending.reply(frame.body)
            case Request():
                self._on_request(frame)
            case Item():
                pending = self.pending.get(frame.id)
                if isinstance(pending, PendingStream):
                    pending.item(frame.position, frame.body)
            case End():
                pending = self.pending.get(frame.id)
                if isinstance(pending, PendingStream):
                    pending.end()
            case Failed():
                failed = self.pending.pop(frame.id, None)
                if failed is not None:
                    failed.fail(frame.failure)
            case Cancel():
                answer = self.incoming.pop(frame.id, None)
                if answer is not None and answer.envelope is not None:
                    answer.envelope.cancel()
            case Taken():
                self._on_taken(frame)
            case Demand():
                sink = self.incoming.get(frame.id)
                if sink is not None:
                    sink.credit(frame.count)
            case Watch():
                self._on_watch(frame)
            case Gone():
                self._tell_watchers(frame.id, frame.reason)
            case Booted() | Ended() | Shutdown():
                self.node.processes.received(self.peer_id, frame)

    def _on_request(self, frame: Request) -> None:
        node = self.node
        answer = None
        if frame.kind == ASK:
            answer = self.incoming[frame.id] = RemoteAnswer(self, frame.id)
        elif frame.kind == STREAM:
            answer = self.incoming[frame.id] = RemoteSink(self, frame.id, frame.position)
        life = node.lives.get(frame.to)
        if life is None or life.exit is not None:
            reason = node.exit_of(frame.to) if life is None else life.exit
            self._refuse(frame, Failure(reason=reason))
            return
        try:
            envelope = self._envelope(frame, life, answer)
        except (BadMessage, UnhandledMessage, WouldDeadlock) as error:
            self._refuse(frame, Failure.of(error))
            return
        if answer is not None:
            answer.envelope = envelope
        life.put(envelope)

    def _envelope(self, frame: Request, life: Life, answer: RemoteAnswer | None) -> Envelope:
        table = type(life.actor).table
        handler = table.by_name.get(frame.type)
        if handler is None:
            raise UnhandledMessage(table.actor, frame.type, table.names())
        if frame.chain and handler.exclusive:
            life.check_cycle(frame.chain)
        return Envelope(
            self.node.codec.decode(handler.message, frame.body),
            handler,
            life,
            frame.id,
            answer=answer,
            cause=frame.cause,
            chain=frame.chain,
            deadline=None if frame.left_s is None else self.node.loop.time() + frame.left_s,
            origin=self,
            position=frame.position,
        )

    def _refuse(self, frame: Request, failure: Failure) -> None:
        self.send(Taken(0, frame.to, 1))
        if frame.kind == TELL:
            self.node.dead_letter_by_id(frame.to, frame.type, failure)
        else:
            self.fail(frame.id, failure)

    def _on_taken(self, frame: Taken) -> None:
        flow = self._flows.get(frame.to)
        if flow is None:
            return
        flow.in_flight -= frame.count
        for _ in range(min(frame.count, len(flow.writers))):
            _wake_next(flow)
        if flow.in_flight <= 0 and not flow.writers:
            del self._flows[frame.to]

    def _on_watch(self, frame: Watch) -> None:
        life = self.node.lives.get(frame.to)
        if life is None:
            if frame.on:
                self.send(Gone(0, frame.to, self.node.exit_of(frame.to)))
        elif frame.on:
            life.watchers.add(self, lambda down: self.send(Gone(0, down.ref.id, down.reason)))
        else:
            life.watchers.discard(self)

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
            if answer.envelope is not None:
                answer.envelope.cancel()
        for flow in self._flows.values():
            while flow.writers:
                _wake_next(flow)
        self._flows.clear()
        for life in self.node.lives.values():
            life.watchers.discard(self)
        for actor_id in [*self._watched]:
            self._tell_watchers(actor_id, reason)


def _wake_next(flow: _Flow) -> None:
    while flow.writers:
        writer = flow.writers.popleft()
        if not writer.done():
            writer.set_result(None)
            return
