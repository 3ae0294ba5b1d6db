"""A name for one life of an actor, wherever it is."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

if TYPE_CHECKING:
    from gyre.actors.local import LocalTarget
    from gyre.actors.messages import Ask, Message, Stream, Tell
    from gyre.actors.streams import ItemStream

R = TypeVar("R")
I = TypeVar("I")  # noqa: E741  Item

ASK_TIMEOUT_S = 30.0

# The id of the actor that every node has. Ids of other lives begin far above.
DESK = 1


class Target(Protocol):
    """Where a Ref leads: a life in this process, one elsewhere, or none."""

    def ask(self, ref: Ref, message: Message, timeout_s: float) -> Coroutine[Any, Any, Any]: ...
    def tell(self, ref: Ref, message: Message, timeout_s: float) -> Coroutine[Any, Any, None]: ...
    def has_room(self, ref: Ref) -> bool: ...
    def stream(self, ref: Ref, message: Message, position: int) -> ItemStream[Any]: ...
    def watch(self, ref: Ref, watcher: LocalTarget) -> None: ...
    def unwatch(self, ref: Ref, watcher: LocalTarget) -> None: ...
    def tie(self, ref: Ref, other: LocalTarget) -> None: ...
    def untie(self, ref: Ref, other: LocalTarget) -> None: ...


@final
class Ref:
    """Names one life of an actor: `name` stays over restarts, `incarnation` counts them. Refs are equal when
    they name the same life; they may be fields of messages and travel between processes."""

    __slots__ = ("endpoint", "id", "incarnation", "name", "node_id", "target")

    def __init__(
        self, node_id: str, endpoint: str, id: int, name: str, incarnation: int, target: Target
    ) -> None:
        self.node_id = node_id
        self.endpoint = endpoint
        self.id = id
        self.name = name
        self.incarnation = incarnation
        self.target = target

    def ask(self, message: Ask[R], timeout_s: float = ASK_TIMEOUT_S) -> Coroutine[Any, Any, R]:
        """The handler's answer. In a handler that itself is asked, its caller's deadline counts too.
        Raises what the handler raised (RemoteError, or a wire error's own type), AskTimeout, ActorDied,
        WouldDeadlock, UnhandledMessage, BadMessage. Cancelling it cancels the handler."""
        return self.target.ask(self, message, timeout_s)

    def tell(self, message: Tell, timeout_s: float = ASK_TIMEOUT_S) -> Coroutine[Any, Any, None]:
        """Returns when the message is on its way: waits only while the mailbox is full, then MailboxFull.
        A dead actor is no error: the message counts as a dead letter."""
        return self.target.tell(self, message, timeout_s)

    def stream(self, message: Stream[I], position: int = 0) -> ItemStream[I]:
        """The handler's items from `position` on, opened at the first `anext`. What the handler raises is
        raised here; `aclose()`, or cancelling an `anext`, cancels the handler. Raises as `ask` does."""
        if position < 0:
            raise ValueError(f"a stream has no position {position}")
        return self.target.stream(self, message, position)

    @property
    def label(self) -> str:
        return f"{self.name}#{self.incarnation}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self.id == other.id and self.node_id == other.node_id

    def __hash__(self) -> int:
        return hash((self.node_id, self.id))

    def __repr__(self) -> str:
        return f"<Ref {self.label} at {self.node_id[:8]}>"
