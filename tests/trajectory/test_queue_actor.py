from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from gyre.actors import Actor, ChildSpec, Node, Ref, RemoteError, handles
from gyre.cell.messages import (
    Accept,
    CellGone,
    HandOver,
    Idle,
    Lease,
    Manifest,
    ReturnLease,
    StepCommitted,
    StepComplete,
    StopClaiming,
)
from gyre.loss.microstep import MicroStepStats
from gyre.schedule.messages import MicroStepsReady, StepDone
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import AddGroup
from gyre.trajectory.queue import QueueConfig, QueueTotals
from gyre.trajectory.queue_actor import GetQueueTotals, MicroStepQueue
from gyre.trajectory.rows import StepMember
from tests.trajectory.queue_parts import GROUPS_PER_STEP, claim, group_name, manifest, micro_steps


class Listener(Actor):
    """Stands where the WaterlevelActor stands and passes on what it is told."""

    def __init__(self, told: asyncio.Queue[Any]) -> None:
        self._told = told

    @handles(MicroStepsReady)
    async def ready(self, message: MicroStepsReady) -> None:
        self._told.put_nowait(message)

    @handles(StepDone)
    async def done(self, message: StepDone) -> None:
        self._told.put_nowait(message)


class Setting:
    def __init__(self, node: Node, path: Path) -> None:
        self.node = node
        self.path = path
        self.told: asyncio.Queue[Any] = asyncio.Queue()
        self.queue: Ref

    async def start(self, journal: Journal, **changes: float) -> None:
        listener = await self.node.spawn(ChildSpec(name="waterlevel", start=lambda: Listener(self.told)))
        config = msgspec.structs.replace(QueueConfig(groups_per_step=GROUPS_PER_STEP), **changes)
        spec = ChildSpec(
            name="queue", start=lambda: MicroStepQueue(config, journal, listener), restart="temporary"
        )
        self.queue = await self.node.spawn(spec)

    async def add(self, number: int, count: int) -> None:
        step = number // GROUPS_PER_STEP
        message = AddGroup(
            group=group_name(number), step=step, executions=4, micro_steps=micro_steps(number, count)
        )
        await self.queue.ask(message)

    async def lease(self, cell: int, version: int = 0) -> Lease:
        answer = await self.queue.ask(claim(cell, version=version))
        assert isinstance(answer, Lease)
        return answer

    def rows(self, table: str, column: str, kind: type) -> list[Any]:
        with sqlite3.connect(f"file:{self.path}?mode=ro", uri=True) as connection:
            found = connection.execute(f"SELECT {column} FROM {table} ORDER BY rowid").fetchall()
        return [msgspec.msgpack.decode(blob, type=kind) for (blob,) in found]


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    path = tmp_path / "journal.db"
    async with Journal(path) as journal, Node(name="test") as node:
        setting = Setting(node, path)
        await setting.start(journal)
        yield setting


def committed(step: int) -> StepCommitted:
    return StepCommitted(
        step=step,
        version=step + 1,
        grad_norm=0.5,
        lr=0.01,
        seconds=1.5,
        stats=MicroStepStats(
            micro_steps=1, trajectories=4, trained_tokens=10, tokens=50, loss=8.0, clipped=1
        ),
        cells=(0,),
        micro_steps_by_cell={0: 1},
    )


async def test_a_step_from_group_to_commit(setting: Setting) -> None:
    waiting = asyncio.create_task(setting.lease(0))
    await setting.add(0, 1)
    lease = await waiting
    await setting.add(1, 0)
    assert await setting.queue.ask(claim(0, holds=(lease.token,))) == HandOver(step=0)
    assert await setting.queue.ask(Accept(manifest=manifest(0, [lease])))
    complete = await setting.queue.ask(claim(0))
    assert isinstance(complete, StepComplete) and complete.executions == 8
    with capture_logs() as logs:
        await setting.queue.tell(committed(0))
        assert await setting.queue.ask(GetQueueTotals()) == QueueTotals(steps=1, micro_steps_by_cell={0: 1})
    (step,) = [entry for entry in logs if entry["event"] == "step"]
    assert step["loss"] == 1.0 and step["clip_fraction"] == 0.25 and step["executions"] == 8
    told = [setting.told.get_nowait() for _ in range(setting.told.qsize())]
    assert told == [
        MicroStepsReady(step=0, unclaimed=0, uncommitted=0),
        MicroStepsReady(step=0, unclaimed=0, uncommitted=1),
        MicroStepsReady(step=0, unclaimed=0, uncommitted=1, complete=True),
        StepDone(step=0, version=1),
        MicroStepsReady(step=1, unclaimed=0, uncommitted=0),
    ]


async def test_what_was_answered_is_in_the_journal(setting: Setting) -> None:
    await setting.add(0, 1)
    member = StepMember(step=0, group="g000000", executions=4, micro_steps=("0.g000000.0",))
    assert setting.rows("step_members", "member", StepMember) == [member]
    contribution = manifest(1, [await setting.lease(1)])
    for _ in range(2):
        assert await setting.queue.ask(Accept(manifest=contribution))
    assert setting.rows("contributions", "manifest", Manifest) == [contribution]
    await setting.add(1, 0)
    await setting.queue.tell(committed(0))
    await setting.queue.ask(GetQueueTotals())
    assert setting.rows("steps", "committed", StepCommitted) == [committed(0)]


async def test_a_refused_contribution_is_not_journalled(setting: Setting) -> None:
    await setting.add(0, 1)
    lease = await setting.lease(1)
    await setting.queue.ask(CellGone(cell=1, incarnation=1))
    with capture_logs() as logs:
        assert not await setting.queue.ask(Accept(manifest=manifest(1, [lease])))
    assert [entry["event"] for entry in logs] == ["contribution_refused"]
    assert setting.rows("contributions", "manifest", Manifest) == []
    assert (await setting.lease(2)).micro_step == lease.micro_step


async def test_a_returned_lease_goes_to_a_claim_that_waits(setting: Setting) -> None:
    await setting.add(0, 1)
    lease = await setting.lease(1)
    waiting = asyncio.create_task(setting.lease(2))
    await setting.queue.ask(GetQueueTotals())
    await setting.queue.tell(ReturnLease(cell=1, incarnation=1, token=lease.token))
    assert (await waiting).micro_step == lease.micro_step


async def test_a_cell_that_leaves_gets_its_claim_back(setting: Setting) -> None:
    waiting = asyncio.create_task(setting.queue.ask(claim(1)))
    await setting.queue.ask(GetQueueTotals())
    await setting.queue.tell(StopClaiming(cell=1, incarnation=1))
    assert await waiting == Idle()


async def test_a_claim_whose_asker_gave_up_takes_nothing(setting: Setting) -> None:
    waiting = asyncio.create_task(setting.queue.ask(claim(1)))
    await setting.queue.ask(GetQueueTotals())
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await setting.add(0, 1)
    assert (await setting.lease(2)).token == 1


async def test_a_wrong_group_is_its_senders_error(setting: Setting) -> None:
    with pytest.raises(RemoteError, match="step is 7, must be 0"):
        await setting.queue.ask(AddGroup(group="g000001", step=7, executions=1, micro_steps=()))
    await setting.add(1, 1)


async def test_time_alone_ends_patience_and_leases(tmp_path: Path) -> None:
    async with Journal(tmp_path / "journal.db") as journal, Node(name="test") as node:
        setting = Setting(node, tmp_path / "journal.db")
        await setting.start(journal, patience_s=0.05, lease_s=1.0, hand_over_patience_s=0.02)
        assert await setting.queue.ask(claim(1)) == Idle()
        await setting.add(0, 1)
        lease = await setting.lease(1)
        assert await setting.queue.ask(claim(1, holds=(lease.token,))) == HandOver(step=0)
        with capture_logs() as logs:
            while not isinstance(answer := await setting.queue.ask(claim(2)), Lease):
                pass
        assert answer.micro_step == lease.micro_step
        assert [entry["event"] for entry in logs] == ["lease_expired"]
