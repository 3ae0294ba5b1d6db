"""A message on its way, and the scope it is handled in."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from gyre.actors.deadlines import Expiring
from gyre.actors.errors import AskTimeout

if TYPE_CHECKING:
    from gyre.actors.handlers import Handler
    from gyre.actors.local import LocalTarget

INNER_MARGIN_S = 0.02


class Waiter(NamedTuple):
    """One link of a call chain: a handler that waits and lets no other message in meanwhile."""

    node_id: str
    actor_id: int
    message_id: int
    label: str


Chain = tuple[Waiter, ...]


class Answer(Protocol):
    """Where a handler's result goes: a future of this loop, a pipe, or frames to another process."""

    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...
    def done(self) -> bool: ...


class Origin(Protocol):
    """The peer a message came from, which wants to know when it has left the mailbox."""

    def taken(self, actor_id: int) -> None: ...


class Envelope(msgspec.Struct, eq=False):
    """A message with what its way needs; also the scope its handler runs in: what the handler sends carries
    the cause, the deadline and the chain from here. A Struct because two are made for each ask, and C makes
    them four times as fast."""

    message: Any
    handler: Handler
    life: LocalTarget
    id: int
    cause: int
    answer: Answer | None = None
    chain: Chain = ()
    deadline: float | None = None
    timeout_s: float = 0.0
    origin: Origin | None = None
    slot: dict[Expiring, None] | None = None
    task: asyncio.Task[None] | None = None
    void: bool = False

    def chain_from_here(self) -> Chain:
        """The chain of what its handler asks."""
        if not self.handler.exclusive:
            return self.chain
        life = self.life
        return (*self.chain, Waiter(life.node.id, life.id, self.id, life.ref.label))

    @property
    def waiter(self) -> int:
        """The message whose exclusive handler waits for what is asked from here; 0 where there is none."""
        if self.handler.exclusive:
            return self.id
        return self.chain[-1].message_id if self.chain else 0

    def expire(self) -> None:
        answer = self.answer
        if answer is not None and not answer.done():
            label = self.life.ref.label
            answer.set_exception(AskTimeout(label, type(self.message).__name__, self.timeout_s))
        self.cancel()

    def cancel(self) -> None:
        """Its asker is gone: it is not handled, or its handler is cancelled."""
        if not self.void:
            self.void = True
            self.life.cancel(self)


CURRENT: ContextVar[Envelope | None] = ContextVar("gyre_current", default=None)


def deadline_of(current: Envelope | None, now: float, timeout_s: float) -> float:
    """The deadline of what is asked in the scope `current`. It ends a little before its asker's own, so
    that the one furthest in is the one that is named."""
    deadline = now + timeout_s
    if current is not None and current.deadline is not None:
        return min(deadline, current.deadline - INNER_MARGIN_S)
    return deadline
