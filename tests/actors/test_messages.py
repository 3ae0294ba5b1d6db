from __future__ import annotations

import typing

import pytest

from gyre.actors import Ask, Stream, Tell
from gyre.actors.messages import answer_type, wire_name
from tests.actors.zoo import Add, Cat, Count, Dog, Fail, Pet

T = typing.TypeVar("T")


class Forward(Ask["Cat"], frozen=True, kw_only=True):
    pass


class Derived(Add, frozen=True, kw_only=True):
    pass


class Open(Ask[T], typing.Generic[T], frozen=True, kw_only=True):
    pass


class Bare(Stream, frozen=True, kw_only=True):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    ("message", "answer"),
    [(Add, int), (Derived, int), (Fail, None), (Count, int), (Pet, Cat | Dog | None), (Forward, Cat)],
)
def test_answer_is_the_parameter_of_the_message_class(message: type, answer: object) -> None:
    assert answer_type(message) == answer


@pytest.mark.parametrize("message", [Open, Bare])
def test_a_message_that_leaves_its_answer_open_is_refused(message: type) -> None:
    with pytest.raises(TypeError, match="say what it is answered with"):
        answer_type(message)


def test_wire_name_says_module_and_class() -> None:
    assert wire_name(Add) == "tests.actors.zoo:Add"


def test_messages_are_frozen() -> None:
    message = Add(amount=1)
    with pytest.raises(AttributeError):
        message.amount = 2  # type: ignore[misc]
    assert isinstance(Add(amount=1), Ask)
    assert not isinstance(Add(amount=1), Tell)
