"""What is seen of actors, as plain data."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gyre.actors.errors import WireError

State = Literal["starting", "running", "stopping", "restarting", "ended", "unanswered"]


class HandlerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of message, since counting began: how many were handled, in how long, how many raised. The
    rate is of the time between two looks, where there were two."""

    message: str
    count: int
    failed: int
    seconds: float
    p99_s: float
    rate_per_s: float | None = None


class HandlingReport(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is being handled; since when is known of those that began while handlers are counted."""

    message: str
    for_s: float | None


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last error: raised by the handler of `message` and told to its asker, or, with `message` empty,
    the end of the life before this one."""

    error: str
    message: str
    ago_s: float
    traceback: str


class DeadLetterReport(msgspec.Struct, frozen=True, kw_only=True):
    to: str
    message: str
    why: str
    ago_s: float


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The process that an actor and what is below it live in. `counted_s` is how long its handlers have been
    counted: zero where this look began it. `peers` are the nodes it is connected to."""

    name: str
    id: str
    host: str
    pid: int
    endpoint: str
    up_s: float
    counted_s: float
    actors: int
    peers: tuple[str, ...]
    dead_letters: int
    last_dead_letters: tuple[DeadLetterReport, ...]


class ActorReport(msgspec.Struct, frozen=True, kw_only=True):
    """One actor and what lives below it. `node` is set where a process begins. In the mailbox `waiting`
    messages wait, and `writers` senders for room. `hidden` children are not shown. An actor whose process
    does not answer is `unanswered`, and `why` says what is known."""

    path: str
    kind: str
    state: State
    incarnation: int = 1
    why: str = ""
    waiting: int = 0
    writers: int = 0
    capacity: int = 0
    tasks: int = 0
    handling: tuple[HandlingReport, ...] = ()
    restarts: int = 0
    last_error: FailureReport | None = None
    summary: dict[str, Any] = {}
    handlers: tuple[HandlerReport, ...] = ()
    node: NodeReport | None = None
    children: tuple[ActorReport, ...] = ()
    hidden: int = 0


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was handled. `at_s` is when that began, in seconds since 1970 by its machine's clock.
    `cause` is the id of the message in whose handler it was sent, 0 where there was none. `outcome` is `ok`,
    `cancelled` or the error. `lost` messages before it were handled and not reported."""

    at_s: float
    actor: str
    incarnation: int
    message: str
    id: int
    cause: int
    duration_s: float
    outcome: str
    lost: int = 0


class NoSuchActor(WireError):
    """No actor has that path now; `living` are the names that its last known part could go on with."""

    def __init__(self, path: str, parent: str, living: list[str]) -> None:
        where = f"{parent} has" if parent else "there are"
        super().__init__(f"no actor {path!r}: {where} {', '.join(living) or 'none below it'}")
        self.path = path
        self.parent = parent
        self.living = living
