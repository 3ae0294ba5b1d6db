from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import structlog

from gyre.actors import Actor, AskTimeout, ChildSpec, Node, Ref, RemoteError, handles
from gyre.cell.engine import SampledLeg
from gyre.schedule.messages import EvalDone, GroupFinished
from gyre.trajectory.actor import TrajectoryActor, TrajectoryActorConfig
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import AddGroup, GetCalls, GetResume, GetTotals, SetWaterlevel
from gyre.trajectory.reader import JournalReader
from gyre.trajectory.records import (
    CallRetried,
    ExecutionEnded,
    ExecutionOpened,
    RecordCall,
    RecordSampled,
)
from tests.trajectory.trees import calls_tool, record, result, says, spec, user

Inbox = asyncio.Queue[Any]
CONFIG = TrajectoryActorConfig(
    sampling=SamplingConfig(), group_size=2, groups_per_step=2, micro_step_tokens=64
)


class Receiver(Actor):
    """Stands where the queue and the WaterlevelActor stand and keeps what it is sent."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    @handles(AddGroup)
    async def add_group(self, message: AddGroup) -> None:
        self._inbox.put_nowait(message)

    @handles(GroupFinished)
    async def group_finished(self, message: GroupFinished) -> None:
        self._inbox.put_nowait(message)

    @handles(EvalDone)
    async def eval_done(self, message: EvalDone) -> None:
        self._inbox.put_nowait(message)


class Room:
    """A TrajectoryActor with its journal, and what it sent to queue and waterlevel."""

    def __init__(self, ref: Ref, receiver: Ref, inbox: Inbox, path: Path) -> None:
        self.ref = ref
        self.receiver = receiver
        self.inbox = inbox
        self.path = path

    async def sent(self, kind: type[Any]) -> Any:
        message = await self.inbox.get()
        assert isinstance(message, kind)
        return message

    async def open(self, execution: str, **fields: int) -> None:
        await self.ref.ask(ExecutionOpened(spec=spec(execution, **fields)))

    async def call(self, call: str, parent: str | None = None, **fields: Any) -> None:
        await self.ref.ask(RecordCall(record=record(call, parent, **fields)))

    async def end(
        self, execution: str, score: float | None, reason: str = "completed", **fields: int
    ) -> None:
        its = spec(execution, **fields)
        await self.ref.ask(ExecutionEnded(spec=its, result=result(execution, score, reason)))

    async def run(self, execution: str, score: float | None, **fields: int) -> None:
        await self.open(execution, **fields)
        await self.call("a", execution=execution)
        await self.call("b", "a", execution=execution, out=[4, 5])
        await self.end(execution, score, **fields)


@asynccontextmanager
async def running(
    path: Path, config: TrajectoryActorConfig = CONFIG, *, waterlevel: bool = True
) -> AsyncIterator[Room]:
    inbox: Inbox = asyncio.Queue()
    async with Journal(path) as journal, Node(name="test") as node:
        receiver = await node.spawn(ChildSpec(name="receiver", start=lambda: Receiver(inbox)))
        ref = await node.spawn(
            ChildSpec(name="trajectory", start=lambda: TrajectoryActor(config, journal, receiver))
        )
        room = Room(ref, receiver, inbox, path)
        if waterlevel:
            await ref.ask(SetWaterlevel(ref=receiver))
        yield room


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def test_a_complete_group_becomes_micro_steps_of_its_step(path: Path) -> None:
    async with running(path) as room:
        await room.run("g000003.00", 1.0)
        await room.run("g000003.01", 0.0)
        added = await room.sent(AddGroup)
        assert (added.group, added.step, added.executions) == ("g000003", 1, 2)
        (micro_step,) = added.micro_steps
        assert micro_step.id == "1.g000003.0"
        assert {t.execution: t.advantage for t in micro_step.trajectories} == {
            "g000003.00": 1.0,
            "g000003.01": -1.0,
        }
        assert await room.sent(GroupFinished) == GroupFinished(group="g000003")


async def test_an_answered_call_is_in_the_journal(path: Path) -> None:
    async with running(path) as room:
        await room.open("g000000.00")
        await room.call("a")
        with JournalReader(path) as reader:
            assert [call.call for call in reader.calls("g000000.00")] == ["a"]


async def test_a_call_on_its_way_to_the_journal_is_among_those_that_are_asked_for(path: Path) -> None:
    """Else a proxy that is back would sample it anew."""

    async def known(room: Room) -> list[str]:
        async with aclosing(room.ref.stream(GetCalls(execution="g000000.00"))) as calls:
            return [one.call async for one in calls]

    async with running(path) as room:
        await room.open("g000000.00")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # the journal waits
            recording = asyncio.create_task(room.call("a"))
            await asyncio.sleep(0)
            asked = asyncio.create_task(known(room))
            await asyncio.wait([asked], timeout=0.3)
            other.execute("ROLLBACK")
        await recording
        assert await asked == ["a"]


async def test_a_call_that_does_not_fit_is_refused_with_its_ids(path: Path) -> None:
    async with running(path) as room:
        await room.open("g000000.00")
        with pytest.raises(RemoteError, match=r"execution g000000\.00, call b: its parent x is not recorded"):
            await room.call("b", "x")
        await room.call("a")  # The actor lives on.


async def test_a_group_of_another_size_than_the_jobs_is_refused(path: Path) -> None:
    async with running(path) as room:
        with pytest.raises(RemoteError, match="its group has 3 executions, the job's have 2"):
            await room.open("g000000.00", group_executions=3)


async def test_equal_scores_add_a_group_that_counts_without_micro_steps(path: Path) -> None:
    async with running(path) as room:
        for execution in ("g000000.00", "g000000.01"):
            await room.run(execution, 0.5)
        assert await room.sent(AddGroup) == AddGroup(group="g000000", step=0, executions=2, micro_steps=())


async def test_every_token_of_complete_groups_is_trained_or_listed_with_a_reason(path: Path) -> None:
    """Of each execution 3 tokens are sampled; another 1 by an attempt that is begun anew."""
    with structlog.testing.capture_logs() as logs:
        async with running(path) as room:
            await room.open("g000000.00")
            await room.call("a", execution="g000000.00")
            groups = {
                "g000000": (1.0, 0.0),
                "g000001": (0.5, 0.5),
                "g000002": (1.0, None),
                "e000000": (1.0, 0.0),
            }
            for group, scores in groups.items():
                for index, score in enumerate(scores):
                    await room.run(f"{group}.{index:02d}", score)
                for told in (EvalDone,) if group[0] == "e" else (AddGroup, GroupFinished):
                    await room.sent(told)
            totals = await room.ref.ask(GetTotals())
    assert totals.trained_tokens == 6
    assert totals.excluded_tokens == {
        "discarded_group": 3,
        "dropped": 3,
        "earlier_attempt": 1,
        "evaluation": 6,
        "zero_advantage": 6,
    }
    assert totals.groups_without_signal == 1
    found = {log["group"]: log for log in logs if log["event"] in ("group", "group_discarded")}
    assert [found[group].get("without_signal") for group in sorted(found)] == [False, True, None]
    assert found["g000000"]["trained_tokens"] == 6
    assert found["g000001"]["excluded_tokens"] == {"zero_advantage": 6}


async def test_what_was_not_delivered_is_in_the_journal_when_it_is_answered(path: Path) -> None:
    async with running(path) as room:
        await room.open("g000000.00")
        leg = SampledLeg(call="g000000.00-1-0000", stay=0, tokens=7)
        await room.ref.ask(RecordSampled(execution="g000000.00", legs=(leg,)))
        with JournalReader(path) as reader:
            assert reader.undelivered("g000000.00") == {leg.call: 7}


async def test_a_group_with_one_score_is_discarded_and_still_finished(path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with running(path) as room:
            await room.run("g000000.00", 1.0)
            await room.run("g000000.01", None)
            assert await room.sent(AddGroup) == AddGroup(
                group="g000000", step=0, executions=0, micro_steps=()
            )
            await room.sent(GroupFinished)
    (discarded,) = [log for log in logs if log["event"] == "group_discarded"]
    assert (discarded["group"], discarded["scored"], discarded["dropped"]) == ("g000000", 1, 1)


async def test_an_evaluation_is_done_when_its_executions_ended_and_is_never_trained(path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with running(path) as room:
            sizes = {"group_executions": 3, "step": 4, "version": 5}
            for execution, score in {"e000001.00": 1.0, "e000001.01": 0.5, "e000001.02": None}.items():
                await room.run(execution, score, **sizes)
            done = await room.sent(EvalDone)
            assert done == EvalDone(step=4, version=5, score=0.75, executions=2)
            assert room.inbox.empty()
            (score_of_it,) = (await room.ref.ask(GetTotals())).evals
            assert (score_of_it.step, score_of_it.score) == (4, 0.75)
    (event,) = [log for log in logs if log["event"] == "eval"]
    assert (event["score"], event["dropped"]) == (0.75, 1)


async def test_an_evaluation_without_a_score_is_done_and_is_no_zero(path: Path) -> None:
    async with running(path) as room:
        await room.run("e000000.00", None, group_executions=1)
        done = await room.sent(EvalDone)
        assert math.isnan(done.score)
        assert done.executions == 0
        assert (await room.ref.ask(GetTotals())).evals == ()


async def test_what_an_execution_was_is_told_in_one_event_and_in_the_totals(path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with running(path) as room:
            await room.open("g000000.00")
            delegate = calls_tool("delegate", prompt="file the box")
            await room.call("m1", messages=[user("tidy")], output=delegate)
            await room.call("a1", messages=[user("file the box")], output=says("filed"))
            await room.call("m2", "m1", out=[1, 2])
            await room.call("s", "m2", output=says("half of it is done"), has_tools=False)
            await room.call("m3", messages=[user("So far: half of it is done")])
            await room.ref.tell(CallRetried(execution="g000000.00", call="m2"))
            await room.end("g000000.00", 0.25, "harness_timeout")
            totals = await room.ref.ask(GetTotals())
    (event,) = [log for log in logs if log["event"] == "execution_finished"]
    expected = {
        "execution": "g000000.00",
        "score": 0.25,
        "reason": "harness_timeout",
        "calls": 5,
        "tokens": 6,
        "turns": 3,
        "roles": {"main": 3, "sub_agent": 1, "main_summary": 1},
        "compactions": 1,
        "sub_agents": 1,
        "retries": 1,
    }
    assert {key: event[key] for key in expected} == expected
    assert (totals.compactions, totals.sub_agents, totals.retries) == (1, 1, 1)
    assert (totals.executions, totals.calls, totals.sampled_tokens) == (1, 5, 6)


@pytest.mark.parametrize("parsed", [0, 1])
async def test_an_execution_none_of_whose_tool_calls_is_well_formed_is_told(path: Path, parsed: int) -> None:
    """Malformed calls grew unseen until the policy collapsed (verl#6252)."""
    with structlog.testing.capture_logs() as logs:
        async with running(path) as room:
            await room.open("g000000.00")
            await room.call("a", malformed_tool_calls=2)
            await room.call("b", "a", parsed_tool_calls=parsed)
            await room.end("g000000.00", 1.0)
            await room.run("g000000.01", 0.0)
            await room.sent(AddGroup)
            await room.sent(GroupFinished)
            totals = await room.ref.ask(GetTotals())
    assert (totals.tool_calls, totals.malformed_tool_calls) == (parsed, 2)
    found = {log["event"]: log for log in logs if log.get("execution") != "g000000.01"}
    for event in ("execution_finished", "group"):
        counts = (found[event]["tool_calls"], found[event]["malformed_tool_calls"])
        assert counts == (parsed, 2)
    assert ("execution_without_tool_call" in found) == (parsed == 0)


async def test_an_end_said_twice_is_counted_once(path: Path) -> None:
    async with running(path) as room:
        await room.open("g000000.00")
        await asyncio.gather(room.end("g000000.00", 1.0), room.end("g000000.00", 1.0))
        assert (await room.ref.ask(GetTotals())).executions == 1


async def test_an_end_counts_though_its_sender_gave_up_waiting(path: Path) -> None:
    async with running(path) as room:
        await room.open("e000000.00", group_executions=1)
        disk_is_busy = sqlite3.connect(path, isolation_level=None)
        disk_is_busy.execute("BEGIN IMMEDIATE")
        its = spec("e000000.00", group_executions=1)
        with pytest.raises(AskTimeout):
            await room.ref.ask(ExecutionEnded(spec=its, result=result("e000000.00", 0.5)), timeout_s=0.1)
        disk_is_busy.execute("ROLLBACK")
        disk_is_busy.close()
        assert (await room.sent(EvalDone)).score == 0.5


async def test_what_finished_before_the_waterlevel_was_known_is_told_then(path: Path) -> None:
    async with running(path, waterlevel=False) as room:
        for execution in ("g000000.00", "g000000.01"):
            await room.run(execution, 0.5)
        await room.sent(AddGroup)
        await room.ref.ask(SetWaterlevel(ref=room.receiver))
        assert await room.sent(GroupFinished) == GroupFinished(group="g000000")


async def test_a_new_life_plans_again_what_was_complete_and_knows_what_is_missing(path: Path) -> None:
    async with running(path) as room:
        for execution, score in {"g000000.00": 1.0, "g000000.01": 0.0, "g000001.01": 1.0}.items():
            await room.run(execution, score)
        before = await room.sent(AddGroup)
        await room.open("g000001.00")
        totals = await room.ref.ask(GetTotals())
    async with running(path) as room:
        assert await room.sent(AddGroup) == before
        assert await room.sent(GroupFinished) == GroupFinished(group="g000000")
        assert await room.ref.ask(GetTotals()) == totals
        state = await room.ref.ask(GetResume())
        assert state.finished == ("g000000",)
        assert [(group.group, group.ended) for group in state.incomplete] == [("g000001", ("g000001.01",))]
        assert state.next_group == 2
        await room.run("g000001.00", 0.0)
        assert (await room.sent(AddGroup)).group == "g000001"


async def test_steps_before_the_first_are_not_planned_again(path: Path) -> None:
    async with running(path) as room:
        for number in range(3):
            for execution in (f"g{number:06d}.00", f"g{number:06d}.01"):
                await room.run(execution, 0.5)
            await room.sent(AddGroup)
            await room.sent(GroupFinished)
    config = TrajectoryActorConfig(
        sampling=SamplingConfig(), group_size=2, groups_per_step=2, micro_step_tokens=64, first_step=1
    )
    async with running(path, config) as room:
        assert (await room.sent(AddGroup)).group == "g000002"
        assert (await room.ref.ask(GetResume())).finished == ("g000002",)
        totals = await room.ref.ask(GetTotals())
        assert totals.executions == 6
        assert [(reward.step, reward.executions) for reward in totals.rewards] == [(0, 4), (1, 2)]
