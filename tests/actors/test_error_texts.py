"""Errors whose text is no good text: they reach who asked and who watches, like any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gyre.actors import (
    Actor,
    ActorDied,
    Ask,
    BadMessage,
    ChildSpec,
    ExitReason,
    Ref,
    RemoteError,
    Tell,
    handles,
)
from gyre.actors.errors import MAX_CAUSES, MAX_TEXT_CHARS, Failure
from tests.actors.conftest import start
from tests.actors.pairs import Two, two_nodes
from tests.actors.zoo import Observe, Observed, Observer

SURROGATE = "no file 'caf\udce9.txt'"
LONG = "x" * 80_000_000


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class RaiseIt(Ask[int], frozen=True, kw_only=True):
    which: str


class CrashIt(Tell, frozen=True, kw_only=True):
    which: str


class Nested(Ask[list[object]], frozen=True, kw_only=True):
    """Answered with a list that holds itself."""


def bad_error(which: str) -> Exception:
    match which:
        case "surrogate":
            return OSError(SURROGATE)
        case "long":
            return ValueError(LONG)
    return Unprintable()


class Odd(Actor):
    @handles(RaiseIt)
    async def raise_it(self, message: RaiseIt) -> int:
        raise bad_error(message.which)

    @handles(CrashIt)
    async def crash_it(self, message: CrashIt) -> None:
        raise bad_error(message.which)

    @handles(Nested)
    async def nested(self, message: Nested) -> list[object]:
        items: list[object] = []
        items.append(items)
        return items


@pytest.fixture
async def pair() -> AsyncIterator[Two]:
    async with two_nodes("memory") as two:
        yield two


@pytest.mark.parametrize("which", ["surrogate", "long", "unprintable"])
@pytest.mark.parametrize("far", [False, True])
async def test_what_was_asked_is_told(pair: Two, which: str, far: bool) -> None:
    ref = await start(pair.b, Odd())
    asked = pair.carry(ref) if far else ref
    for _ in range(2):  # and the actor lives on
        with pytest.raises(RemoteError) as caught:
            await asked.ask(RaiseIt(which=which), timeout_s=20.0)
        assert len(caught.value.message) <= MAX_TEXT_CHARS + 100
        assert caught.value.type_name.endswith(("OSError", "ValueError", "Unprintable"))


@pytest.mark.parametrize("which", ["surrogate", "long", "unprintable"])
@pytest.mark.parametrize("far", [False, True])
async def test_who_watches_is_told(pair: Two, which: str, far: bool) -> None:
    ref = await start(pair.b, Odd())
    here = await start(pair.b, Observer(), "here")
    observer = await start(pair.a, Observer(), "observer") if far else here
    await here.tell(Observe(ref=ref))
    if far:
        await observer.tell(Observe(ref=pair.carry(ref)))
        await pair.carry(here).ask(Observed(count=0))
    await observer.ask(Observed(count=0))
    await ref.tell(CrashIt(which=which))
    async with asyncio.timeout(20):
        (down,) = await observer.ask(Observed(count=1))
        await here.ask(Observed(count=1))
    assert down.reason.kind == "error"
    with pytest.raises(ActorDied):
        await ref.ask(RaiseIt(which=which), timeout_s=20.0)


async def test_an_answer_that_holds_itself_is_a_bad_message(pair: Two) -> None:
    ref = pair.carry(await start(pair.b, Odd()))
    for _ in range(2):
        with pytest.raises(BadMessage, match="cannot be encoded"):
            await ref.ask(Nested(), timeout_s=20.0)


async def test_a_start_that_fails_in_bad_words_is_known(pair: Two) -> None:
    class NoStart(Actor):
        async def started(self) -> None:
            raise bad_error("unprintable")

    with pytest.raises(Exception, match="could not be started"):
        async with asyncio.timeout(20):
            await pair.a.spawn(ChildSpec(name="x", start=NoStart))


def test_a_chain_of_causes_has_an_end() -> None:
    reason = ExitReason(kind="error", type_name="First")
    for number in range(1000):
        reason = ExitReason.of(ActorDied(_ref(number), reason))
    assert len(reason.traces) <= MAX_CAUSES + 1
    assert reason.first.type_name == "First"
    assert len(str(reason)) <= MAX_TEXT_CHARS + 100


def test_long_words_keep_both_ends() -> None:
    failure = Failure.of(ValueError("begin" + LONG + "end"))
    assert failure.message.startswith("begin")
    assert failure.message.endswith("end")
    assert len(failure.message) <= MAX_TEXT_CHARS + 100


def _ref(number: int) -> Ref:
    return Ref("n", "", number, "x", 1, None)  # type: ignore[arg-type]
