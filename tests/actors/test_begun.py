"""Handlers of messages from other nodes begin as these arrive, and go on in their actor's task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from gyre.actors import (
    Actor,
    ActorDied,
    Ask,
    ChildSpec,
    NodeFailed,
    Ref,
    RemoteError,
    Tell,
    handles,
)
from gyre.actors.begun import begin
from gyre.actors.envelope import Envelope
from gyre.actors.life import Life
from tests.actors.conftest import life, start, until
from tests.actors.pairs import Two, two_nodes

Do = Callable[["Doer"], Awaitable[Any]]


class Run(Ask[int], frozen=True, kw_only=True):
    what: str


class Note(Tell, frozen=True, kw_only=True):
    what: str


class Doer(Actor):
    """Does what a test has given a name."""

    def __init__(self) -> None:
        self.todo: dict[str, Do] = {}
        self.seen: list[Any] = []

    @handles(Run)
    async def run(self, message: Run) -> int:
        self.seen.append(("begin", message.what, asyncio.current_task()))
        try:
            return await self.todo[message.what](self) or 0
        finally:
            self.seen.append(("end", message.what, asyncio.current_task()))

    @handles(Note)
    async def note(self, message: Note) -> None:
        self.seen.append(message.what)
        await self.todo[message.what](self)


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with two_nodes("memory") as two:
        yield two


class Far:
    """A Doer on one node, its Ref on another, and it rests."""

    def __init__(self, doer: Doer, local: Ref, far: Ref) -> None:
        self.doer = doer
        self.local = local
        self.far = far

    async def do(self, what: Do) -> int:
        self.doer.todo["it"] = what
        return await self.far.ask(Run(what="it"))


async def far_doer(two: Two) -> Far:
    doer = Doer()
    local = await start(two.b, doer, shutdown_s=0.2)
    made = Far(doer, local, two.carry(local))
    assert await made.do(nothing) == 0  # begins its main task, which rests then
    doer.seen.clear()
    return made


async def nothing(doer: Doer) -> None:
    return


async def several_turns(doer: Doer) -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_that_waits_for_nothing_ends_as_it_arrives(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await far_doer(two)
    order: list[str] = []
    arrives = Life.put_at_once

    def put_at_once(life: Life, envelope: Envelope) -> None:
        order.append("arrives")
        arrives(life, envelope)
        order.append("has arrived")

    async def note(doer: Doer) -> int:
        order.append("handled")
        return 7

    monkeypatch.setattr(Life, "put_at_once", put_at_once)
    assert await made.do(note) == 7
    assert order == ["arrives", "handled", "has arrived"]


@pytest.mark.parametrize("waits", [False, True])
async def test_all_of_it_is_of_its_actors_task(two: Two, waits: bool) -> None:
    made = await far_doer(two)

    async def maybe(doer: Doer) -> None:
        if waits:
            await asyncio.sleep(0)

    await made.do(maybe)
    (_, _, begun), (_, _, ended) = made.doer.seen
    assert begun is ended is life(made.local)._main


async def test_they_are_handled_one_after_another(two: Two) -> None:
    made = await far_doer(two)
    made.doer.todo["long"] = several_turns
    made.doer.todo["short"] = nothing
    await asyncio.gather(*(made.far.ask(Run(what=what)) for what in ("long", "short", "long", "short")))
    assert [(at, what) for at, what, _ in made.doer.seen] == [
        (at, what) for what in ("long", "short", "long", "short") for at in ("begin", "end")
    ]


async def test_what_it_raises_is_the_answer(two: Two) -> None:
    made = await far_doer(two)

    async def at_once(doer: Doer) -> None:
        raise KeyError("at once")

    async def later(doer: Doer) -> None:
        await asyncio.sleep(0)
        raise KeyError("later")

    for what, text in ((at_once, "at once"), (later, "later")):
        with pytest.raises(RemoteError, match=text):
            await made.do(what)
    assert await made.do(nothing) == 0


@pytest.mark.parametrize("waits", [False, True])
async def test_a_tell_that_raises_ends_its_actor(waits: bool) -> None:
    async def fail(doer: Doer) -> None:
        if waits:
            await asyncio.sleep(0)
        raise KeyError("no")

    with pytest.raises(NodeFailed, match="KeyError: 'no'"):
        async with two_nodes("memory") as two:
            made = await far_doer(two)
            made.doer.todo["fail"] = fail
            await made.far.tell(Note(what="fail"))
            with pytest.raises(ActorDied, match="KeyError"):
                await made.do(nothing)
            await asyncio.Event().wait()  # its node fails, which ends this


async def test_it_may_stop_its_actor(two: Two) -> None:
    made = await far_doer(two)

    async def stop(doer: Doer) -> int:
        doer.context.stop()
        return 3

    assert await made.do(stop) == 3
    assert (await life(made.local).ended).kind == "normal"


async def test_a_timeout_of_its_own_that_is_over_at_once_is_a_timeout(two: Two) -> None:
    made = await far_doer(two)

    async def wait(doer: Doer) -> int:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return 1
        return 2

    assert await made.do(wait) == 1
    assert await made.do(nothing) == 0


async def test_a_group_of_its_own_that_fails_at_once_fails_in_it(two: Two) -> None:
    made = await far_doer(two)

    async def fail() -> None:
        raise KeyError("one of them")

    async def group(doer: Doer) -> int:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
                await asyncio.Event().wait()
        except* KeyError:
            doer.seen.append("caught")
        await asyncio.sleep(0)
        return 4

    assert await made.do(group) == 4
    assert "caught" in made.doer.seen


async def test_one_that_is_cancelled_before_it_goes_on_is_cancelled_where_it_waits(two: Two) -> None:
    made = await far_doer(two)
    waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(doer: Doer) -> None:
        # The turn in which the handler has begun and its task has not gone on.
        asyncio.get_running_loop().call_soon(doer.context._life._current.cancel)
        await waited

    asked = asyncio.create_task(made.do(wait))
    await asyncio.wait([waited])
    assert waited.cancelled()
    assert await made.do(nothing) == 0
    asked.cancel()


async def test_a_crash_before_it_goes_on_ends_both(two: Two) -> None:
    made = await far_doer(two)

    async def wait(doer: Doer) -> None:
        asyncio.get_running_loop().call_soon(life(made.local).kill)
        await asyncio.Event().wait()

    with pytest.raises(ActorDied):
        await made.do(wait)
    assert made.doer.seen[-1][0] == "end"


async def test_an_actor_that_is_asked_now_and_then_does_not_doze(two: Two) -> None:
    made = await far_doer(two)
    main = life(made.local)._main
    idle = two.b.idle
    for _ in range(4):
        await made.do(nothing)
        idle._sweep()
    assert life(made.local)._main is main
    for _ in range(2):
        idle._sweep()
    await until(lambda: life(made.local)._main is None)
    assert await made.do(nothing) == 0


async def test_from_within_a_task_it_waits_for_its_turn(two: Two) -> None:
    """A message with a blob may be handed over by the task that made room for it."""
    made = await far_doer(two)
    mine = life(made.local)
    answer = asyncio.get_running_loop().create_future()
    mine.put_at_once(Envelope(Run(what="it"), mine.table.by_type[Run], mine, two.b.new_id(), 0, answer))
    assert not made.doer.seen
    assert await answer == 0


async def test_a_plain_yield_lets_others_run() -> None:
    order: list[str] = []

    async def yields() -> str:
        order.append("begun")
        await asyncio.sleep(0)
        order.append("gone on")
        return "done"

    rest = asyncio.get_running_loop().create_future()

    async def main() -> Any:
        return await (await rest)

    task = asyncio.create_task(main())
    await asyncio.sleep(0)

    def at_once() -> None:
        rest.set_result(begin(yields(), task))
        order.append("back")

    asyncio.get_running_loop().call_soon(at_once)
    assert await task == "done"
    assert order == ["begun", "back", "gone on"]


async def test_spawning_from_it_works(two: Two) -> None:
    made = await far_doer(two)

    async def spawn(doer: Doer) -> int:
        child = await doer.context.spawn(ChildSpec(name="child", start=Doer))
        return int(life(child).path == "a/child")

    assert await made.do(spawn) == 1


def test_an_exit_in_it_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback of a socket would keep it."""
    monkeypatch.setattr("gyre.actors.family.KILL_WAIT_S", 0.1)  # the actor's task is over and says nothing

    async def leave(doer: Doer) -> None:
        raise SystemExit(3)

    async def scenario() -> None:
        async with two_nodes("unix") as two:
            made = await far_doer(two)
            await made.do(leave)

    with pytest.raises(SystemExit, match="3"):
        uvloop.run(scenario())
