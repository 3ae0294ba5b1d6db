"""What can go wrong, as types with fields, and how it crosses processes."""

from __future__ import annotations

import traceback as traceback_
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from gyre.actors.ref import Ref

E = TypeVar("E", bound=type[BaseException])

# Of what an error says so much is kept, from both ends; of a chain of causes so many, and the first.
MAX_TEXT_CHARS = 32_768
MAX_CAUSES = 16


class ExitReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a life ended.

    `normal`: it stopped itself. `stopped`: it was told to. `error`: it raised (`type_name`, `message`,
    `traceback`). `exit`: its process ended by itself (`exit_code` or `signal`). `lost`: the connection to
    its process ended. `unknown`: nothing is known of it here any more. `cause` is why, where it ended
    because of another.
    """

    kind: Literal["normal", "stopped", "error", "exit", "lost", "unknown"]
    message: str = ""
    type_name: str = ""
    traceback: str = ""
    exit_code: int | None = None
    signal: str | None = None
    stderr_tail: tuple[str, ...] = ()
    cause: ExitReason | None = None

    @property
    def abnormal(self) -> bool:
        return self.kind not in ("normal", "stopped")

    @property
    def first(self) -> ExitReason:
        """Where it began: the cause of the cause, and so on."""
        reason = self
        while reason.cause is not None:
            reason = reason.cause
        return reason

    @property
    def traces(self) -> list[str]:
        """The tracebacks of this and of its causes, the first cause last."""
        deeper = [] if self.cause is None else self.cause.traces
        return [self.traceback, *deeper] if self.traceback else deeper

    @property
    def brief(self) -> str:
        """Where it began, in one line."""
        return " ".join(self.first._what.split())

    def __str__(self) -> str:
        if self.stderr_tail and not self.traceback:
            return f"{self._what}; its last output:\n  " + "\n  ".join(self.stderr_tail)
        return self._what

    @property
    def _what(self) -> str:
        text = ": ".join(part for part in (self.type_name or self.kind, self.message) if part)
        if self.signal is not None:
            return f"{text} (killed by {self.signal})"
        return text if self.exit_code is None else f"{text} (exit code {self.exit_code})"

    @classmethod
    def of(cls, error: BaseException) -> ExitReason:
        return cls(
            kind="error",
            message=_text(error),
            type_name=error_name(type(error)),
            traceback=_trace(error),
            cause=_cause(error),
        )


class ActorError(Exception):
    """Base of the runtime's errors."""


class WireError(ActorError):
    """Base of errors that keep their type across processes: a subclass raised by a handler is raised as
    that subclass at the caller, when the caller's process has imported it. Its attributes and `args`
    travel; they must be what msgpack knows (numbers, strings, bytes, lists, dicts)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_error(cls)


class ActorDied(ActorError):
    """The actor is dead, or died before it answered."""

    def __init__(self, ref: Ref, reason: ExitReason) -> None:
        super().__init__(f"{ref.label} died: {reason}")
        self.ref = ref
        self.reason = reason


class AskTimeout(ActorError, TimeoutError):
    """No answer by the deadline; the handler, if it ran, was cancelled."""

    def __init__(self, label: str, message: str, timeout_s: float) -> None:
        super().__init__(f"{label} did not answer {message} within {timeout_s:.3g} s")
        self.label = label
        self.message = message
        self.timeout_s = timeout_s


class MailboxFull(ActorError):
    """A tell found no room in the mailbox for so long."""

    def __init__(self, label: str, timeout_s: float) -> None:
        super().__init__(f"the mailbox of {label} was full for {timeout_s:.3g} s")
        self.label = label
        self.timeout_s = timeout_s


class RemoteError(ActorError):
    """The handler raised: type name (`module:Class`), message, traceback as text."""

    def __init__(self, type_name: str, message: str, traceback: str) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message
        self.traceback = traceback


class SpawnFailed(ActorError):
    """A child could not be started."""

    def __init__(self, name: str, reason: ExitReason) -> None:
        super().__init__(f"{name} could not be started: {reason}")
        self.name = name
        self.reason = reason


class NodeFailed(ActorError):
    """A top-level actor failed and nothing was left to handle it."""

    def __init__(self, name: str, reason: ExitReason) -> None:
        detail = f"\n{reason.traceback}" if reason.traceback else ""
        super().__init__(f"{name} failed: {reason}{detail}")
        self.name = name
        self.reason = reason


class LinkLost(ActorError):
    """A connection to another node could not be made, or ended."""


def _text(error: BaseException) -> str:
    try:
        return _fit(str(error))
    except Exception as failed:
        return f"its text cannot be had: {type(failed).__name__}"


def _trace(error: BaseException) -> str:
    return _fit("".join(traceback_.format_exception(error)))


def _fit(text: str) -> str:
    """As text that fits into a frame; what is no unicode (a file's name may be none) in escapes."""
    left = len(text) - MAX_TEXT_CHARS
    if left > 0:
        half = MAX_TEXT_CHARS // 2
        text = f"{text[:half]} [{left} characters] {text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


def _cause(error: BaseException) -> ExitReason | None:
    """The reason that an error only passes on. Actors that die of each other by turns must not carry all
    their deaths along."""
    cause = _passed_on(error)
    depth, reason = 0, cause
    while reason is not None and depth < MAX_CAUSES:
        depth, reason = depth + 1, reason.cause
    return cause if cause is None or reason is None else cause.first


def _passed_on(error: BaseException) -> ExitReason | None:
    if isinstance(error, BaseExceptionGroup):
        return ExitReason.of(error.exceptions[0])
    if isinstance(error, ActorDied | SpawnFailed | NodeFailed):
        return error.reason
    if isinstance(error, RemoteError):
        return ExitReason(
            kind="error", type_name=error.type_name, message=error.message, traceback=error.traceback
        )
    return None


_wire_errors: dict[str, type[BaseException]] = {}


def error_name(cls: type[BaseException]) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}:{cls.__qualname__}"


def register_error(cls: E) -> E:
    """Class decorator: this error keeps its type across processes, as a WireError does."""
    _wire_errors[error_name(cls)] = cls
    return cls


class WouldDeadlock(WireError):
    """The actor asked waits, through `cycle`, for the handler that asks."""

    def __init__(self, cycle: list[str]) -> None:
        super().__init__(" -> ".join(cycle))
        self.cycle = cycle


class UnhandledMessage(WireError):
    """The actor's table of handlers does not name this message."""

    def __init__(self, actor: str, message: str, handled: list[str]) -> None:
        super().__init__(f"{actor} does not handle {message}; it handles {', '.join(handled) or 'nothing'}")
        self.actor = actor
        self.message = message
        self.handled = handled


class Moved(WireError):
    """For a Stream's handler to raise when another actor is to go on: `resumed` does, at its position."""


class BadMessage(WireError):
    """A message or an answer could not be encoded, or not decoded as its type."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to the caller. With a `reason` the target was dead; else the handler raised."""

    type_name: str = ""
    message: str = ""
    traceback: str = ""
    args: Any = None
    fields: dict[str, Any] | None = None
    reason: ExitReason | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        name = error_name(type(error))
        known = name in _wire_errors
        return cls(
            type_name=name,
            message=_text(error),
            traceback=_trace(error),
            args=list(error.args) if known else None,
            fields=dict(vars(error)) if known else None,
        )

    def without_fields(self) -> Failure:
        return msgspec.structs.replace(self, args=None, fields=None)

    def error(self, ref: Ref) -> BaseException:
        """The exception to raise at the caller of `ref`."""
        if self.reason is not None:
            return ActorDied(ref, self.reason)
        cls = _wire_errors.get(self.type_name) if self.fields is not None else None
        if cls is None:
            return RemoteError(self.type_name, self.message, self.traceback)
        error = cls.__new__(cls)  # not its __init__, whose parameters are its own business
        error.args = tuple(self.args or ())
        error.__dict__.update(self.fields or {})
        return error


def as_seen_by_caller(error: BaseException, ref: Ref) -> BaseException:
    """What a caller in the same process gets: the same type as one elsewhere would."""
    if error_name(type(error)) in _wire_errors:
        return error
    failed = Failure.of(error).error(ref)
    failed.__cause__ = error
    return failed


class Remembered(NamedTuple):
    """What a handler raised, on which message, and when by the loop's clock; as text, because an error
    itself keeps all frames that it came through."""

    error: str
    traceback: str
    message: str
    at_s: float

    @classmethod
    def of(cls, error: BaseException, message: str, at_s: float) -> Remembered:
        """`error`: as its asker sees it."""
        if isinstance(error, RemoteError):
            return cls(str(error), error.traceback, message, at_s)
        return cls(f"{error_name(type(error))}: {error}", "", message, at_s)
