from __future__ import annotations

import asyncio
import weakref

import pytest

from gyre.actors import (
    Actor,
    ActorDied,
    Ask,
    AskTimeout,
    BadMessage,
    ChildSpec,
    MailboxFull,
    Node,
    RemoteError,
    SpawnFailed,
    Tell,
    UnhandledMessage,
    handles,
)
from tests.actors.conftest import life, start
from tests.actors.zoo import (
    Add,
    Asleep,
    Bump,
    Counter,
    Crash,
    Hang,
    Hold,
    Observe,
    Observed,
    Observer,
    Overflow,
    Quit,
    Raise,
    Release,
    Shop,
    Slow,
    Total,
    Unheard,
)


async def test_ask_is_answered_by_the_handler(node: Node) -> None:
    ref = await start(node, Counter())
    assert await ref.ask(Add(amount=2)) == 2
    assert await ref.ask(Add(amount=3)) == 5


async def test_tells_and_asks_of_one_sender_are_handled_in_order(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    for i in range(300):
        await ref.tell(Bump(amount=i))
    await ref.ask(Add(amount=0))
    assert counter.seen == [f"bump {i}" for i in range(300)]


async def test_one_message_at_a_time(node: Node) -> None:
    slow = Slow()
    ref = await start(node, slow)
    await ref.tell(Hold())
    asked = asyncio.create_task(ref.ask(Total()))
    await asyncio.sleep(0)
    await ref.tell(Bump())
    await asyncio.sleep(0.01)
    assert not asked.done()
    await ref.tell(Release())
    assert await asked == 0
    assert await ref.ask(Total()) == 1


async def test_concurrent_handlers_run_while_another_waits(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    hanging = asyncio.create_task(ref.ask(Hang()))
    await counter.hanging.wait()
    assert await ref.ask(Total()) == 0
    hanging.cancel()


async def test_what_a_handler_raises_is_raised_at_the_asker(node: Node) -> None:
    ref = await start(node, Shop())
    with pytest.raises(RemoteError) as caught:
        await ref.ask(Raise(which="other"))
    assert caught.value.type_name == "KeyError"
    assert caught.value.message == "'other'"
    assert "in oops" in caught.value.traceback
    assert isinstance(caught.value.__cause__, KeyError)


async def test_wire_errors_keep_their_type(node: Node) -> None:
    ref = await start(node, Shop())
    with pytest.raises(Overflow) as caught:
        await ref.ask(Raise(which="overflow"))
    assert caught.value.window == 8
    with pytest.raises(Asleep):
        await ref.ask(Raise(which="asleep"))


async def test_an_actor_survives_what_an_ask_raises(node: Node) -> None:
    ref = await start(node, Shop())
    for _ in range(3):
        with pytest.raises(RemoteError):
            await ref.ask(Raise(which="other"))


async def test_a_message_without_a_handler_is_named_with_those_that_have_one(node: Node) -> None:
    ref = await start(node, Shop())
    with pytest.raises(
        UnhandledMessage, match=r"Shop does not handle tests\.actors\.zoo:Unheard; it handles .*Pet"
    ):
        await ref.ask(Unheard())
    with pytest.raises(UnhandledMessage):
        await ref.tell(Bump())


async def test_an_ask_ends_at_its_deadline_and_its_handler_is_cancelled(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    with pytest.raises(AskTimeout, match=r"a#1 did not answer Hang within 0\.02 s"):
        await ref.ask(Hang(), timeout_s=0.02)
    assert await ref.ask(Add(amount=1)) == 1
    assert counter.seen == ["hang ended"]


async def test_cancelling_an_ask_cancels_its_handler(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    asked = asyncio.create_task(ref.ask(Hang()))
    await counter.hanging.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await ref.ask(Add(amount=1)) == 1
    assert counter.seen == ["hang ended"]


async def test_an_ask_cancelled_before_its_turn_is_never_handled(node: Node) -> None:
    slow = Slow()
    ref = await start(node, slow)
    await ref.tell(Hold())
    asked = asyncio.create_task(ref.ask(Total()))
    await asyncio.sleep(0)
    asked.cancel()
    await ref.tell(Release())
    assert await ref.ask(Total()) == 0
    assert life(ref).mailbox.running == 0


class SwallowsCancel(Actor):
    def __init__(self) -> None:
        self.entered = asyncio.Event()

    @handles(Hang)
    async def hang(self, message: Hang) -> None:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    @handles(Total)
    async def total(self, message: Total) -> int:
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
        return asyncio.current_task().cancelling()  # type: ignore[union-attr]


async def test_a_handler_that_swallows_its_cancel_leaves_the_actor_as_it_was(node: Node) -> None:
    actor = SwallowsCancel()
    ref = await start(node, actor)
    asked = asyncio.create_task(ref.ask(Hang()))
    await actor.entered.wait()
    asked.cancel()
    assert await ref.ask(Total()) == 0


class AwaitsCancelled(Actor):
    @handles(Hang)
    async def hang(self, message: Hang) -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task

    @handles(Raise, concurrent=True)
    async def oops(self, message: Raise) -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task


@pytest.mark.parametrize("message", [Hang(), Raise(which="")])
async def test_a_handler_that_awaits_a_cancelled_task_answers_with_an_error(
    node: Node, message: Ask[None]
) -> None:
    ref = await start(node, AwaitsCancelled())
    with pytest.raises(RemoteError, match="was cancelled"):
        await ref.ask(message, timeout_s=5)


# --- mailboxes ----------------------------------------------------------------------------------


async def test_tell_waits_for_room_in_a_full_mailbox(node: Node) -> None:
    ref = await start(node, Slow(), mailbox=4)
    await ref.tell(Hold())
    await asyncio.sleep(0)
    for _ in range(4):
        await ref.tell(Bump())
    fifth = asyncio.create_task(ref.tell(Bump()))
    await asyncio.sleep(0.01)
    assert not fifth.done()
    assert len(life(ref).mailbox.queue) == 4
    slow = life(ref).actor
    assert isinstance(slow, Slow)
    slow.gate.set()
    await fifth
    assert await ref.ask(Total()) == 5


async def test_a_full_mailbox_is_an_error_after_the_timeout(node: Node) -> None:
    slow = Slow()
    ref = await start(node, slow, mailbox=1)
    await ref.tell(Hold())
    await asyncio.sleep(0)
    await ref.tell(Bump())
    with pytest.raises(MailboxFull, match="the mailbox of a#1 was full for"):
        await ref.tell(Bump(), timeout_s=0.02)
    with pytest.raises(AskTimeout):
        await ref.ask(Total(), timeout_s=0.02)
    slow.gate.set()


async def test_writers_of_a_full_mailbox_learn_of_its_end(node: Node) -> None:
    ref = await start(node, Slow(), mailbox=1)
    await ref.tell(Hold())
    await asyncio.sleep(0)
    await ref.tell(Bump())
    asked = asyncio.create_task(ref.ask(Total()))
    told = asyncio.create_task(ref.tell(Bump()))
    await asyncio.sleep(0)
    life(ref).kill()
    with pytest.raises(ActorDied):
        await asked
    await told
    assert node.dead_letters.count == 2


async def test_a_down_overtakes_a_full_mailbox(node: Node) -> None:
    observer = Observer()
    watching = await start(node, observer, "observer", mailbox=1)
    target = await start(node, Counter())
    await watching.tell(Observe(ref=target))
    await target.tell(Quit())
    (down,) = await watching.ask(Observed(count=1))
    assert down.ref == target
    assert down.reason.kind == "normal"


async def test_two_actors_that_flood_each_other_go_on(node: Node) -> None:
    class Flood(Tell, frozen=True, kw_only=True):
        left: int

    got: list[int] = []
    enough = asyncio.Event()

    class Flooder(Actor):
        other: object = None

        @handles(Flood)
        async def flood(self, message: Flood) -> None:
            got.append(message.left)
            if len(got) >= 20:
                enough.set()
            if message.left:
                for _ in range(2):
                    try:
                        await self.other.tell(Flood(left=message.left - 1), timeout_s=0.05)  # type: ignore[attr-defined]
                    except MailboxFull:
                        return

    one, two = Flooder(), Flooder()
    a, b = await start(node, one, "a", mailbox=2), await start(node, two, "b", mailbox=2)
    one.other, two.other = b, a
    await a.tell(Flood(left=12))
    async with asyncio.timeout(10):
        await enough.wait()


# --- starting and stopping ----------------------------------------------------------------------


async def test_a_start_that_raises_is_the_spawners_error(node: Node) -> None:
    class NoStart(Actor):
        async def started(self) -> None:
            raise ValueError("not today")

    with pytest.raises(SpawnFailed, match="a could not be started: ValueError: not today"):
        await start(node, NoStart())
    assert node.lookup("a") is None


async def test_a_constructor_that_raises_is_the_spawners_error(node: Node) -> None:
    def make() -> Actor:
        raise ValueError("no actor")

    with pytest.raises(SpawnFailed, match="no actor"):
        await node.spawn(ChildSpec(name="a", start=make))


async def test_a_name_is_taken_until_its_actor_is_gone(node: Node) -> None:
    ref = await start(node, Counter())
    with pytest.raises(SpawnFailed, match="has a child of that name"):
        await start(node, Counter())
    await node.stop(ref)
    assert await start(node, Counter()) != ref


async def test_stop_finishes_the_message_at_hand_and_fails_the_rest(node: Node) -> None:
    slow = Slow()
    ref = await start(node, slow)
    await ref.tell(Hold())
    asked = asyncio.create_task(ref.ask(Total()))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(node.stop(ref))
    await asyncio.sleep(0)
    slow.gate.set()
    await stopping
    with pytest.raises(ActorDied, match="a#1 died: stopped"):
        await asked
    with pytest.raises(ActorDied):
        await ref.ask(Total())


async def test_an_actor_that_does_not_stop_in_time_is_killed(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter, shutdown_s=0.05)
    asked = asyncio.create_task(ref.ask(Hang()))
    await counter.hanging.wait()
    await node.stop(ref)
    with pytest.raises(ActorDied, match="did not stop in time"):
        await asked
    assert counter.seen == ["hang ended"]


async def test_stopping_runs_after_a_crash_too(node: Node) -> None:
    counter = Counter()
    observer = await start(node, Observer(), "observer")
    ref = await start(node, counter)
    await observer.tell(Observe(ref=ref))
    await observer.ask(Observed(count=0))
    await ref.tell(Crash())
    (down,) = await observer.ask(Observed(count=1))
    assert counter.seen == ["stopping"]
    assert down.reason.kind == "error"
    assert down.reason.type_name == "ValueError"
    assert "in crash" in down.reason.traceback


async def test_monitoring_the_dead_tells_at_once(node: Node) -> None:
    ref = await start(node, Counter())
    await node.stop(ref)
    observer = await start(node, Observer(), "observer")
    await observer.tell(Observe(ref=ref))
    (down,) = await observer.ask(Observed(count=1))
    assert down.reason.kind == "stopped"


async def test_dead_letters_are_counted(node: Node) -> None:
    ref = await start(node, Counter())
    await node.stop(ref)
    for _ in range(3):
        await ref.tell(Bump())
    assert node.dead_letters.count == 3
    assert node.dead_letters.last[-1][:3] == ("a#1", "tests.actors.zoo:Bump", "stopped")


async def test_whoever_keeps_the_ref_does_not_keep_the_state(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    await node.stop(ref)
    assert life(ref).actor is not counter
    assert life(ref).id not in node.lives


# --- the context --------------------------------------------------------------------------------


class Later(Tell, frozen=True, kw_only=True):
    text: str


class Timed(Actor):
    def __init__(self) -> None:
        self.got: list[str] = []
        self.come = asyncio.Event()

    async def started(self) -> None:
        self.context.tell_after(0.02, Later(text="late"))
        self.context.tell_after(0.01, Later(text="early"))
        self.context.tell_after(0.01, Later(text="never")).cancel()

    @handles(Later)
    async def later(self, message: Later) -> None:
        self.got.append(message.text)
        if message.text == "late":
            self.come.set()


async def test_timers_deliver_into_the_mailbox(node: Node) -> None:
    timed = Timed()
    await start(node, timed)
    await timed.come.wait()
    assert timed.got == ["early", "late"]


class Background(Actor):
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.ended = asyncio.Event()

    async def started(self) -> None:
        self.context.run(self.work(), name="work")

    async def work(self) -> None:
        if self.fails:
            raise ValueError("in the background")
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def test_a_background_task_ends_with_its_actor(node: Node) -> None:
    actor = Background(fails=False)
    ref = await start(node, actor)
    await asyncio.sleep(0)
    await node.stop(ref)
    assert actor.ended.is_set()


async def test_what_a_background_task_raises_crashes_its_actor(node: Node) -> None:
    observer = await start(node, Observer(), "observer")
    ref = await start(node, Background(fails=True))
    await observer.tell(Observe(ref=ref))
    (down,) = await observer.ask(Observed(count=1))
    assert down.reason.message == "in the background"


async def test_monitoring_needs_a_handler_for_it(node: Node) -> None:
    class Blind(Actor):
        async def started(self) -> None:
            self.context.monitor(self.context.ref)

    with pytest.raises(SpawnFailed, match="does not handle Down"):
        await start(node, Blind())


def test_bad_message_is_a_wire_error() -> None:
    assert BadMessage("x").args == ("x",)


async def test_cancelled_timers_leave_nothing(node: Node) -> None:
    actor = Background(fails=False)
    ref = await start(node, actor)
    handler = Timed.table.by_type[Later]
    life(ref)._handlers = {Later: handler}
    for _ in range(10):
        actor.context.tell_after(60, Later(text="never")).cancel()
    assert life(ref).background.pending == 1, "its task"


async def test_a_watchers_end_leaves_nothing_at_the_watched(node: Node) -> None:
    ref = await start(node, Counter())
    observer = await start(node, Observer(), "observer")
    await observer.tell(Observe(ref=ref))
    await observer.ask(Observed(count=0))
    await node.stop(observer)
    assert not life(ref).watchers


async def test_an_ask_may_have_no_deadline(node: Node) -> None:
    ref = await start(node, Counter())
    assert await ref.ask(Add(amount=1), timeout_s=float("inf")) == 1
    assert node.deadlines._ticks == []


async def test_deadlines_that_were_met_leave_nothing(node: Node) -> None:
    ref = await start(node, Counter())
    for _ in range(1000):
        await ref.ask(Add(amount=1))
    assert sum(len(slot) for slot in node.deadlines._slots.values()) == 0


async def test_a_message_that_comes_as_its_actor_dozes_off_is_handled(node: Node) -> None:
    counter = Counter()
    ref = await start(node, counter)
    await ref.ask(Add(amount=1))
    await asyncio.sleep(0)
    assert life(ref).resting() is not None
    life(ref).doze()
    await ref.tell(Bump(amount=2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert counter.total == 3
    assert await ref.ask(Add(amount=1)) == 4


class Parcel(Tell, frozen=True, kw_only=True, weakref=True):
    """Can be watched for its end."""


class Porter(Actor):
    @handles(Parcel)
    async def take(self, message: Parcel) -> None:
        return


async def test_an_actor_that_rests_does_not_keep_its_last_message(node: Node) -> None:
    ref = await start(node, Porter())
    parcel = Parcel()
    kept = weakref.ref(parcel)
    await ref.tell(parcel)
    del parcel
    await asyncio.sleep(0)
    life(ref).doze()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert kept() is None
