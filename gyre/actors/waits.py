"""Who waits for whom within a node: what finds deadlocks of independent chains of asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.actors.envelope import Chain

if TYPE_CHECKING:
    from gyre.actors.local import LocalTarget


class Waits:
    """By the message that an exclusive handler is at, the actors whose turn it waits for: `first`, mostly the
    only one, and those that it asks at the same time. There is an entry only while an ask is under way."""

    def __init__(self) -> None:
        self.first: dict[int, LocalTarget] = {}
        self._further: dict[int, list[LocalTarget]] = {}

    def __len__(self) -> int:
        return len(self.first) + len(self._further)

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

    def of(self, message_id: int) -> list[LocalTarget]:
        first = self.first.get(message_id)
        return [] if first is None else [first, *self._further.get(message_id, ())]

    def cycle(self, chain: Chain, actor: LocalTarget) -> list[str] | None:
        """The labels on the way back to a handler of `chain`, where `actor` cannot take an ask of that chain
        before that handler has ended. An actor waits for what the handler that it is in waits for."""
        if actor.current is None:
            return None
        node_id = actor.node.id
        waiting = {waiter.message_id: at for at, waiter in enumerate(chain) if waiter.node_id == node_id}
        seen: set[int] = set()
        ways = [(actor, [actor.ref.label])]
        while ways:
            actor, way = ways.pop()
            current = actor.current
            if current is None or current.id in seen:
                continue
            if (at := waiting.get(current.id)) is not None:
                return [*(waiter.label for waiter in chain[at:]), *way]
            seen.add(current.id)
            ways += [(other, [*way, other.ref.label]) for other in self.of(current.id)]
        return None
