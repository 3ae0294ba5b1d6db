from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gyre.actors import Actor, ChildSpec, handles
from tests.actors.zoo import Add, Count, Counter, Total


def test_table_holds_what_the_class_declares() -> None:
    handler = Counter.table.by_type[Add]
    assert handler.exclusive
    assert not Counter.table.by_type[Total].exclusive
    assert Counter.table.by_type[Count].streams
    assert Counter.table.by_name["tests.actors.zoo:Add"] is handler


def test_two_methods_for_one_message_are_refused() -> None:
    with pytest.raises(TypeError, match="two methods handle Add"):

        class Twice(Actor):
            @handles(Add)
            async def one(self, message: Add) -> int:
                return 1

            @handles(Add)
            async def two(self, message: Add) -> int:
                return 2


def test_a_stream_needs_an_async_generator() -> None:
    with pytest.raises(TypeError, match="async generator"):

        class NoStream(Actor):
            @handles(Count)  # type: ignore[arg-type]
            async def count(self, message: Count) -> AsyncIterator[int]:
                raise NotImplementedError


def test_a_plain_function_is_refused() -> None:
    with pytest.raises(TypeError, match="must be an async def"):

        class Plain(Actor):
            @handles(Add)  # type: ignore[arg-type]
            def add(self, message: Add) -> int:
                return 1


def test_an_overriding_method_is_declared_anew() -> None:
    class Double(Counter):
        @handles(Add)
        async def add(self, message: Add) -> int:
            return 2 * message.amount

    assert Double.table.by_type[Add].method is Double.add
    assert Counter.table.by_type[Add].method is Counter.add


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 101])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no name for an actor"):
        ChildSpec(name=name, start=Counter)
