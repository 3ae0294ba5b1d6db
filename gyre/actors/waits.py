"""Who waits for whom within a node: what finds deadlocks of independent chains of asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.actors.envelope import Chain

if TYPE_CHECKING:
    from gyre.actors.local import LocalTarget


class Waits:
    """By the message that an exclusive handler is at, the actors whose turn it waits for. There is an entry
    only while such a handler has an ask under way."""

    def __init__(self) -> None:
        self._actors: dict[int, list[LocalTarget]] = {}

    def __len__(self) -> int:
        return len(self._actors)

    def add(self, message_id: int, actor: LocalTarget) -> None:
        self._actors.setdefault(message_id, []).append(actor)

    def discard(self, message_id: int, actor: LocalTarget) -> None:
        actors = self._actors[message_id]
        actors.remove(actor)
        if not actors:
            del self._actors[message_id]

    def cycle(self, chain: Chain, actor: LocalTarget) -> list[str] | None:
        """The labels on the way back to a handler of `chain`, where `actor` cannot take an ask of that chain
        before that handler has ended. An actor waits for what the handler that it is in waits for."""
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
            ways += [(other, [*way, other.ref.label]) for other in self._actors.get(current.id, ())]
        return None
