"""What a node is asked by those who look."""

from __future__ import annotations

from gyre.actors.looking.reports import ActorReport, Traced
from gyre.actors.messages import Ask, Stream

WITHIN_S = 4.0


class Inspect(Ask[ActorReport], frozen=True, kw_only=True):
    """To a node: the actor at `path`, by names from the top of the node or, with `life`, from below that
    actor of it, and what lives below, in other processes too. Those have the greater part of `within_s` to
    answer. Handlers are counted from the first of these on, until none came for a while. `under` is the
    path of where `path` begins. Raises NoSuchActor."""

    path: str = ""
    life: int = 0
    under: str = ""
    within_s: float = WITHIN_S


class Trace(Stream[Traced], frozen=True, kw_only=True):
    """To a node: each message that is handled, from now on, by the actor at `path` or below it, in other
    processes too; as for Inspect."""

    path: str = ""
    life: int = 0
    under: str = ""
