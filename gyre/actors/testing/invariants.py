"""What holds of every node after every step."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from weakref import WeakKeyDictionary

from gyre.actors.family import Family
from gyre.actors.flow import CREDIT
from gyre.actors.life import Life
from gyre.actors.link import Link
from gyre.actors.node import Node
from gyre.actors.testing.loop import Host


class Invariants:
    """By host. Another host's nodes cannot have changed."""

    def __init__(self, nodes: dict[Host | None, list[Node]]) -> None:
        self._nodes = nodes
        self._parents: MutableMapping[Node, dict[int, Life]] = WeakKeyDictionary()

    def check(self, host: Host | None, now: float) -> list[str]:
        """What does not hold of that host's nodes."""
        faults: list[str] = []
        for node in self._nodes.get(host, ()):
            faults += _of_family(node._family, now)
            for life in node.lives.values():
                faults += _of_life(life, node, now)
            for link in node.links.all():
                faults += _of_link(link, node)
            faults += self._of_the_dead(node)
        return faults

    def _of_the_dead(self, node: Node) -> Iterable[str]:
        """Those who had children and are gone since the last step."""
        parents = self._parents.setdefault(node, {})
        parents.update((life.id, life) for life in node.lives.values() if life._family is not None)
        for id in [id for id in parents if id not in node.lives]:
            life = parents.pop(id)
            children = life._family._children.items() if life._family is not None else ()
            living = [name for name, child in children if _lives(child.running) or _lives(child.begun)]
            if living:
                yield f"{life.ref.label} is dead, its children {living} live"


def _of_life(life: Life, node: Node, now: float) -> Iterable[str]:
    mailbox = life.mailbox
    waiting = len(mailbox.queue or ())
    # A peer keeps to its credit, a writer in this process to the bound.
    bound = mailbox.capacity + CREDIT * len(node.links.all())
    if waiting > bound:
        yield f"{waiting} messages in the mailbox of {life.ref.label}, {bound} allowed"
    if mailbox.running != len(life._handling or ()):
        yield f"{life.ref.label} counts {mailbox.running} handlers, {len(life._handling or ())} run"
    if life._family is not None:
        yield from _of_family(life._family, now)


def _of_link(link: Link, node: Node) -> Iterable[str]:
    if link.gone is not None:
        yield f"a link of {node.name} is lost and still used"
    for flow in link.flows._flows.values():
        if flow.in_flight > CREDIT:
            yield f"{flow.in_flight} messages under way from {node.name} to one actor, {CREDIT} allowed"


def _of_family(family: Family, now: float) -> Iterable[str]:
    restarts = family._restarts
    rules = restarts.supervision
    recent = sum(now - at <= rules.window_s for at in restarts._times)
    if recent > rules.max_restarts:
        yield f"{family._parent} restarted its children {recent} times within {rules.window_s:g} s"


def _lives(running: object) -> bool:
    ended = getattr(running, "ended", None)
    return ended is not None and not ended.done()
