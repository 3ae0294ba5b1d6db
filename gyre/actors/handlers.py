"""Which method of an actor handles which message: declared, checked when the class is made."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

from gyre.actors.messages import Ask, Message, Stream, Tell, answer_type, wire_name

A = TypeVar("A")
M = TypeVar("M")
R = TypeVar("R")
I = TypeVar("I")  # noqa: E741  Item
F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__gyre_handles__"


class _AnsweringMethod(Protocol[R]):
    def __call__(self, method: Callable[[A, M], Awaitable[R]], /) -> Callable[[A, M], Awaitable[R]]: ...


class _StreamingMethod(Protocol[I]):
    def __call__(
        self, method: Callable[[A, M], AsyncIterator[I]], /
    ) -> Callable[[A, M], AsyncIterator[I]]: ...


@overload
def handles(message: type[Tell], *, concurrent: bool = False) -> _AnsweringMethod[None]: ...
@overload
def handles(message: type[Ask[R]], *, concurrent: bool = False) -> _AnsweringMethod[R]: ...
@overload
def handles(message: type[Stream[I]], *, positioned: bool = False) -> _StreamingMethod[I]: ...
def handles(
    message: type[Message], *, concurrent: bool = False, positioned: bool = False
) -> Callable[[F], F]:
    """Marks the method that handles `message`.

    Messages are handled one at a time in the order they came. A `concurrent` handler, and a stream's
    (an async generator), starts when its message arrives, even while another handler runs, as a task that
    ends with the actor: between two of its awaits anything may have happened to the state.

    A consumer may begin a stream at a later position than 0, where another producer left it. A handler that
    can begin there is `positioned`, and yields from `self.context.position` on; what any other one yields
    before that position is dropped.
    """

    def mark(method: F) -> F:
        setattr(method, _MARK, (message, concurrent, positioned))
        return method

    return mark


@dataclass(frozen=True, slots=True, eq=False)
class Handler:
    """One row of a table."""

    message: type[Message]
    kind: type[Message]
    method: Callable[[Any, Any], Any]
    exclusive: bool
    positioned: bool = False

    @property
    def streams(self) -> bool:
        return self.kind is Stream


class HandlerTable:
    """What an actor class handles, by message class and by its name between processes."""

    def __init__(self, actor: type) -> None:
        self.actor = actor.__qualname__
        self.by_type: dict[type, Handler] = {}
        for name in dir(actor):
            method = inspect.getattr_static(actor, name)
            if (mark := getattr(method, _MARK, None)) is not None:
                self._add(_handler(actor, method, *mark))
        self.by_name = {wire_name(message): handler for message, handler in self.by_type.items()}

    def mapped(self, change: Callable[[Handler], Handler]) -> HandlerTable:
        """The same with other methods."""
        table = copy(self)
        table.by_type = {message: change(handler) for message, handler in self.by_type.items()}
        table.by_name = {wire_name(message): handler for message, handler in table.by_type.items()}
        return table

    def names(self) -> list[str]:
        return sorted(self.by_name)

    def _add(self, handler: Handler) -> None:
        if handler.message in self.by_type:
            raise TypeError(f"{self.actor}: two methods handle {handler.message.__qualname__}")
        self.by_type[handler.message] = handler


def _handler(
    actor: type, method: Callable[..., Any], message: type[Message], concurrent: bool, positioned: bool
) -> Handler:
    where = f"{actor.__qualname__}.{method.__name__}"
    kind = next((kind for kind in (Tell, Ask, Stream) if issubclass(message, kind)), None)
    if kind is None:
        raise TypeError(f"{where} handles {message!r}, which is not a Tell, Ask or Stream")
    streams = kind is Stream
    if streams and not inspect.isasyncgenfunction(method):
        raise TypeError(f"{where} handles a Stream: make it an async generator")
    if not streams and not inspect.iscoroutinefunction(method):
        raise TypeError(f"{where} must be an async def that returns")
    if positioned and not streams:
        raise TypeError(f"{where} handles no Stream: it has no position")
    if not issubclass(message, Tell):
        answer_type(message)
    return Handler(message, kind, method, not (concurrent or streams), positioned)


async def _no_method(actor: Any, message: Any) -> None:
    """Scopes of no message."""


# The scopes of an actor's background tasks, and of its `started`, in which it takes no message.
INSIDE = Handler(Tell, Tell, _no_method, exclusive=False)
STARTING = Handler(Tell, Tell, _no_method, exclusive=True)
