"""One message to many actors, here and elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gyre.actors import (
    Actor,
    ActorDied,
    Ask,
    AskTimeout,
    BadMessage,
    MailboxFull,
    Node,
    ProcessSpec,
    Ref,
    RemoteError,
    Tell,
    ask_all,
    broadcast,
    handles,
)
from gyre.actors.wire import Codec
from tests.actors.conftest import life, start
from tests.actors.zoo import Add, Bump, Counter, CounterConfig, Fail, Hang, Quit, Total


class Note(Tell, frozen=True, kw_only=True):
    about: Ref | None = None
    anything: Any = None


class Noted(Ask[int], frozen=True, kw_only=True):
    about: Ref | None = None


class Notes(Actor):
    def __init__(self) -> None:
        self.count = 0
        self.open = asyncio.Event()
        self.open.set()

    @handles(Note)
    async def note(self, _: Note) -> None:
        await self.open.wait()
        self.count += 1

    @handles(Noted)
    async def noted(self, _: Noted) -> int:
        return self.count


async def counters(node: Node, here: int, elsewhere: int) -> list[Ref]:
    refs = [await start(node, Counter(), f"here-{i}") for i in range(here)]
    for i in range(elsewhere):
        spec = ProcessSpec(name=f"far-{i}", actor="tests.actors.zoo:Counter", config=CounterConfig())
        refs.append(await node.spawn(spec))
    return refs


async def test_all_are_told_and_all_answer_in_order(node: Node) -> None:
    refs = await counters(node, here=2, elsewhere=2)
    await refs[1].tell(Bump(amount=5))
    await broadcast(refs, Bump(amount=2))
    assert await ask_all(refs, Add(amount=1)) == [3, 8, 3, 3]
    assert await ask_all([], Add(amount=1)) == []
    await broadcast([], Bump())


async def test_an_error_stands_in_its_answers_place(node: Node) -> None:
    refs = [await start(node, Counter(), name) for name in "abc"]
    await refs[1].tell(Quit())
    await asyncio.shield(life(refs[1]).ended)
    first, second, third = await ask_all(refs, Fail(text="no"))
    assert isinstance(first, RemoteError) and isinstance(third, RemoteError)
    assert isinstance(second, ActorDied)
    answers = await ask_all(refs, Total())
    assert answers[0] == answers[2] == 0
    await broadcast(refs, Bump())
    assert node.dead_letters.count == 1


async def test_each_has_the_same_deadline(node: Node) -> None:
    refs = [await start(node, Counter(), name) for name in "ab"]
    answers = await ask_all(refs, Hang(), timeout_s=0.05)
    assert [type(answer) for answer in answers] == [AskTimeout, AskTimeout]


async def test_cancelling_cancels_all_handlers(node: Node) -> None:
    actors = [Counter(), Counter()]
    refs = [await start(node, actor, name) for actor, name in zip(actors, "ab", strict=True)]
    asking = asyncio.create_task(ask_all(refs, Hang()))
    await asyncio.gather(*(actor.hanging.wait() for actor in actors))
    asking.cancel()
    await asyncio.wait([asking])
    assert await ask_all(refs, Add(amount=1)) == [1, 1]
    assert [actor.seen for actor in actors] == [["hang ended"]] * 2


async def test_it_is_encoded_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = 0
    to_wire = Codec._to_wire

    def counted(self: Codec, value: Any) -> Any:
        nonlocal encoded
        encoded += 1
        return to_wire(self, value)

    monkeypatch.setattr(Codec, "_to_wire", counted)
    async with Node(name="test") as node:
        refs = []
        for i in range(3):
            refs.append(
                await node.spawn(ProcessSpec(name=f"p{i}", actor="tests.actors.test_broadcasting:Notes"))
            )
        encoded = 0
        await broadcast([*refs, *refs], Note(about=refs[0]))
        assert encoded == 1
        assert await ask_all(refs, Noted(about=refs[0])) == [2, 2, 2]
        assert encoded == 2


async def test_what_cannot_travel_reaches_nobody(node: Node) -> None:
    notes = Notes()
    here = await start(node, notes)
    there = await node.spawn(ProcessSpec(name="p", actor="tests.actors.test_broadcasting:Notes"))
    with pytest.raises(BadMessage):
        await broadcast([here, there], Note(anything=object()))
    assert await ask_all([here, there], Noted()) == [0, 0]


async def test_a_full_mailbox_holds_up_no_other_and_is_waited_for(node: Node) -> None:
    actors = [Notes() for _ in range(3)]
    slow = actors[1]
    slow.open.clear()
    refs = [await start(node, actor, name, mailbox=2) for actor, name in zip(actors, "abc", strict=True)]
    for _ in range(3):  # one is being handled, two wait
        await refs[1].tell(Note())
        await asyncio.sleep(0)
    telling = asyncio.create_task(broadcast(refs, Note()))
    assert await ask_all([refs[0], refs[2]], Noted()) == [1, 1]
    assert not telling.done()
    slow.open.set()
    await telling
    assert await refs[1].ask(Noted()) == 4


async def test_those_without_room_in_time_are_named(node: Node) -> None:
    actors = [Notes() for _ in range(4)]
    refs = [await start(node, actor, name, mailbox=1) for actor, name in zip(actors, "abcd", strict=True)]
    for slow in (1, 3):
        actors[slow].open.clear()
        for _ in range(2):
            await refs[slow].tell(Note())
            await asyncio.sleep(0)
    with pytest.raises(ExceptionGroup, match="2 of 4 had no room") as refused:
        await broadcast(refs, Note(), timeout_s=0.05)
    assert [type(error) for error in refused.value.exceptions] == [MailboxFull, MailboxFull]
    assert {error.label for error in refused.value.exceptions} == {"b#1", "d#1"}  # type: ignore[attr-defined]
    assert await ask_all([refs[0], refs[2]], Noted()) == [1, 1]
    for slow in (1, 3):
        actors[slow].open.set()
