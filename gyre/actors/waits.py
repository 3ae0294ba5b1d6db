"""Who waits for whom: what finds deadlocks of independent chains of asks.

A deadlock is complete with the last of its asks, so each ask that finds its actor busy looks for a way back
to its own asker: here at once, and along the asks that lead to other nodes by a Seek frame each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gyre.actors.envelope import Chain, Envelope
from gyre.actors.errors import WouldDeadlock
from gyre.actors.wire import Deadlock, Seek

if TYPE_CHECKING:
    from gyre.actors.local import LocalTarget
    from gyre.actors.node import Node
    from gyre.actors.remote import PendingAsk

# Actors on a way that is followed over nodes: it might go round in another cycle.
LONGEST_WAY = 32

Far = Sequence[tuple["PendingAsk", tuple[str, ...]]]


class Waits:
    """By the message that an exclusive handler is at, the actors whose turn it waits for: `first`, mostly the
    only one, and those that it asks at the same time; in `far` its asks of actors of other nodes. There is
    an entry only while an ask is under way."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.far: dict[int, dict[int, PendingAsk]] = {}
        self.first: dict[int, LocalTarget] = {}
        self._further: dict[int, list[LocalTarget]] = {}

    def __len__(self) -> int:
        return len(self.first) + len(self._further) + len(self.far)

    def add(self, message_id: int, actor: LocalTarget) -> None:
        if message_id in self.first:
            self._further.setdefault(message_id, []).append(actor)
        else:
            self.first[message_id] = actor

    def discard(self, message_id: int, actor: LocalTarget) -> None:
        further = self._further.get(message_id)
        if further is None:
            del self.first[message_id]
            return
        if self.first[message_id] is actor:
            self.first[message_id] = further.pop()
        else:
            further.remove(actor)
        if not further:
            del self._further[message_id]

    def add_far(self, message_id: int, ask: PendingAsk) -> None:
        self.far.setdefault(message_id, {})[ask.id] = ask

    def discard_far(self, message_id: int, ask: PendingAsk) -> None:
        asks = self.far[message_id]
        del asks[ask.id]
        if not asks:
            del self.far[message_id]

    def of(self, message_id: int) -> list[LocalTarget]:
        first = self.first.get(message_id)
        return [] if first is None else [first, *self._further.get(message_id, ())]

    # --- searching ------------------------------------------------------------------------------

    def check(self, chain: Chain, actor: LocalTarget) -> Far:
        """Raises WouldDeadlock where `actor` cannot take an ask of `chain` before a handler of it has ended.
        Else the asks on the way that lead to other nodes: `seek` looks further there."""
        return self._search(chain, [(actor, (actor.ref.label,))], ())

    def seek(self, far: Far, chain: Chain, actor_id: int, ask_id: int) -> None:
        """Looks for the way back to `chain` at the nodes where `far` is handled. Where there is one, the ask
        of that chain which waits in the mailbox of `actor_id` ends."""
        self._send(far, Seek(0, 0, actor_id, ask_id, chain, (), ()))

    def sought(self, envelope: Envelope, frame: Seek) -> None:
        """A peer looks through what it has asked here."""
        actors: list[tuple[LocalTarget, tuple[str, ...]]] = []
        far: Far = ()
        if envelope.handler.exclusive:
            actors = [(envelope.life, frame.way)]
        elif envelope.chain:
            # What a concurrent handler asks is what its asker waits for.
            waiter = envelope.chain[-1].message_id
            actors = [(actor, (*frame.way, actor.ref.label)) for actor in self.of(waiter)]
            far = [(ask, (*frame.way, ask.label)) for ask in self.far.get(waiter, {}).values()]
        try:
            far = self._search(frame.chain, actors, far)
        except WouldDeadlock as error:
            self.found(Deadlock(0, frame.actor_id, frame.ask_id, frame.route, tuple(error.cycle)))
        else:
            self._send(far, frame)

    def found(self, frame: Deadlock) -> None:
        """There is a way: to be told where the looking began, by the links that it came by."""
        route = frame.route[:-1] if frame.route[-1:] == (self._node.id,) else frame.route
        if route:
            if (link := self._node.links.get(route[-1])) is not None:
                link.send(Deadlock(0, frame.actor_id, frame.ask_id, route, frame.cycle))
        elif (life := self._node.lives.get(frame.actor_id)) is not None:
            life.end_waiting(frame.ask_id, WouldDeadlock([*frame.cycle]))

    def _send(self, far: Far, frame: Seek) -> None:
        route = (*frame.route, self._node.id)
        for ask, way in far:
            if len(way) <= LONGEST_WAY:
                ask.seek(Seek(0, ask.id, frame.actor_id, frame.ask_id, frame.chain, way, route))

    def _search(self, chain: Chain, ways: list[tuple[LocalTarget, tuple[str, ...]]], far: Far) -> Far:
        """From actor to actor: one waits for what the handler that it is in waits for."""
        node_id = self._node.id
        waiting = {waiter.message_id: at for at, waiter in enumerate(chain) if waiter.node_id == node_id}
        seen: set[int] = set()
        found = [*far]
        while ways:
            actor, way = ways.pop()
            current = actor.current
            if current is None or current.id in seen:
                continue
            if (at := waiting.get(current.id)) is not None:
                raise WouldDeadlock([*(waiter.label for waiter in chain[at:]), *way])
            seen.add(current.id)
            ways += [(other, (*way, other.ref.label)) for other in self.of(current.id)]
            found += [(ask, (*way, ask.label)) for ask in self.far.get(current.id, {}).values()]
        return found
