"""The kinds of messages, and what the runtime itself sends."""

from __future__ import annotations

import sys
from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec

from gyre.actors.errors import ExitReason
from gyre.actors.ref import Ref

R_co = TypeVar("R_co", covariant=True)
I_co = TypeVar("I_co", covariant=True)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor can be sent. Subclass `Tell`, `Ask[Reply]` or `Stream[Item]`, not this."""


class Tell(Message, frozen=True, kw_only=True):
    """A message without an answer. A handler that raises on it crashes its actor."""


class Ask(Message, Generic[R_co], frozen=True, kw_only=True):
    """A message with one answer of type `R`. What its handler raises is the answer too."""


class Stream(Message, Generic[I_co], frozen=True, kw_only=True):
    """A message answered by many items of type `I`, in order, at the consumer's pace."""


class Down(Tell, frozen=True, kw_only=True):
    """To an actor that monitors `ref`: that life is over. Arrives once per monitor, before any message
    sent later. Not sent again for the next life: monitor that anew."""

    ref: Ref
    reason: ExitReason


class Restarted(Tell, frozen=True, kw_only=True):
    """To an actor whose child died and lives again under the same name."""

    name: str
    old: Ref
    ref: Ref
    reason: ExitReason


_names: dict[type, str] = {}
_answers: dict[type, Any] = {}


def wire_name(message: type) -> str:
    """The name a class goes by between processes."""
    name = _names.get(message)
    if name is None:
        name = _names[message] = f"{message.__module__}:{message.__qualname__}"
    return name


def answer_type(message: type) -> Any:
    """`R` of an `Ask[R]`, `I` of a `Stream[I]`; TypeError where the class leaves it open."""
    try:
        return _answers[message]
    except KeyError:
        answer = _answers[message] = _find_answer_type(message)
        return answer


def _find_answer_type(message: type) -> Any:
    for cls in message.__mro__:
        for base in cls.__dict__.get("__orig_bases__", ()):
            if get_origin(base) in (Ask, Stream):
                (answer,) = get_args(base)
                if isinstance(answer, TypeVar):
                    break
                return _resolve(answer, cls)
    raise TypeError(f"{wire_name(message)}: say what it is answered with, as in Ask[int] or Stream[Item]")


def _resolve(answer: Any, cls: type) -> Any:
    if answer is type(None):
        return None
    names = vars(sys.modules[cls.__module__])
    if getattr(answer, "__forward_arg__", None) is not None:
        return eval(answer.__forward_arg__, names)  # the class' own annotation, as typing.get_type_hints does
    return answer
