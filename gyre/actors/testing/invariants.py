"""What holds of every node after every step."""

from __future__ import annotations

from collections.abc import Iterable

from gyre.actors.family import Family
from gyre.actors.flow import CREDIT
from gyre.actors.life import Life
from gyre.actors.node import Node
from gyre.actors.testing.loop import Host


class Invariants:
    """By host. Another host's nodes cannot have changed."""

    def __init__(self, nodes: dict[Host | None, list[Node]]) -> None:
        self._nodes = nodes

    def check(self, host: Host | None, now: float) -> list[str]:
        """What does not hold of that host's nodes."""
        faults: list[str] = []
        for node in self._nodes.get(host, ()):
            faults += _of_family(node._family, now)
            for life in node.lives.values():
                faults += _of_life(life, node, now)
        return faults


def _of_life(life: Life, node: Node, now: float) -> Iterable[str]:
    mailbox = life.mailbox
    waiting = len(mailbox.queue or ())
    # A peer keeps to its credit, a writer in this process to the bound.
    bound = mailbox.capacity + CREDIT * len(node.links.all())
    if waiting > bound:
        yield f"{waiting} messages in the mailbox of {life.ref.label}, {bound} allowed"
    if life.ended.done() and life._family is not None:
        living = [name for name, child in life._family._children.items() if _lives(child.running)]
        if living:
            yield f"{life.ref.label} is dead, its children {living} live"
    if life._family is not None:
        yield from _of_family(life._family, now)


def _of_family(family: Family, now: float) -> Iterable[str]:
    restarts = family._restarts
    rules = restarts.supervision
    recent = sum(now - at <= rules.window_s for at in restarts._times)
    if recent > rules.max_restarts:
        yield f"{family._parent} restarted its children {recent} times within {rules.window_s:g} s"


def _lives(running: object) -> bool:
    ended = getattr(running, "ended", None)
    return ended is not None and not ended.done()
