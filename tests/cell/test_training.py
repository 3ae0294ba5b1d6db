"""The training loop of a cell, against a queue that answers by a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from gyre.actors import ChildSpec, Node, Ref, RemoteError
from gyre.cell.messages import (
    Claim,
    HandOver,
    Idle,
    Manifest,
    ReturnLease,
    Stale,
    StepComplete,
    StopClaiming,
)
from gyre.cell.training import TrainingLoop, accept
from gyre.cell.worker_messages import DropGradients, TrainMicroStep
from gyre.loss import MicroStepStats
from tests.cell.scripted import Answer, Ranks, ScriptedQueue, lease

COMPLETE = StepComplete(step=0, executions=4, stats=MicroStepStats(), cells=(1,))


class Contributions:
    """Stands for the core."""

    def __init__(self) -> None:
        self.done: list[Manifest | StepComplete | int] = []
        self.counts = True

    async def contribute(self, manifest: Manifest) -> bool:
        self.done.append(manifest)
        return self.counts

    async def commit(self, complete: StepComplete) -> int:
        self.done.append(complete)
        return complete.step + 1

    async def pull(self, version: int) -> int:
        self.done.append(version)
        return version + 1  # another step was committed on the way


class Cell:
    def __init__(self, queue: ScriptedQueue, ref: Ref, version: int) -> None:
        self.queue = queue
        self.ranks = Ranks(2)
        self.core = Contributions()
        self.loop = TrainingLoop(
            cell=1,
            incarnation=3,
            core=False,
            version=version,
            queue=ref,
            ranks=self.ranks.all,
            contributor=self.core,
            claim_timeout_s=30.0,
        )

    @property
    def claims(self) -> list[Claim]:
        return [message for message in self.queue.seen if isinstance(message, Claim)]

    @property
    def given_back(self) -> list[int]:
        return [message.token for message in self.queue.seen if isinstance(message, ReturnLease)]

    async def leave(self) -> None:
        """When all of the script was answered."""
        await self.queue.drained.wait()
        await self.loop.leave()


@asynccontextmanager
async def training(script: Iterable[Answer], version: int = 0) -> AsyncIterator[Cell]:
    queue = ScriptedQueue(script)
    async with Node(name="test") as node:
        ref = await node.spawn(ChildSpec(name="queue", start=lambda: queue, restart="temporary"))
        cell = Cell(queue, ref, version)
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(cell.loop.run())
            yield cell
            await run


async def test_what_was_computed_is_handed_over_when_the_queue_says_so() -> None:
    async with training([lease(1), lease(2), HandOver(step=0)]) as cell:
        await cell.leave()
    assert [claim.holds for claim in cell.claims] == [(), (1,), (1, 2), ()]
    assert [m.micro_step.id for m in cell.ranks.asked] == ["0.g000000.1", "0.g000000.2"]
    (manifest,) = cell.core.done
    assert manifest == Manifest(
        step=0,
        cell=1,
        incarnation=3,
        version=0,
        micro_steps=("0.g000000.1", "0.g000000.2"),
        tokens=(1, 2),
        checksums=(),
        stats=MicroStepStats(micro_steps=2, trajectories=4),
    )
    assert cell.loop.micro_steps == 2


async def test_a_claim_says_who_asks_and_what_it_holds() -> None:
    async with training([lease(1)]) as cell:
        await cell.leave()
    assert cell.claims[1] == Claim(cell=1, incarnation=3, version=0, holds=(1,), core=False)


async def test_stats_are_of_one_contribution() -> None:
    async with training([lease(1), HandOver(step=0), lease(2), HandOver(step=0)]) as cell:
        await cell.leave()
    assert [m.stats.micro_steps for m in cell.core.done if isinstance(m, Manifest)] == [1, 1]


async def test_an_idle_cell_claims_again() -> None:
    async with training([Idle(), Idle()]) as cell:
        await cell.leave()
    assert len(cell.claims) == 3
    assert cell.ranks.asked == cell.core.done == []


async def test_the_new_version_is_claimed_under_after_a_commit() -> None:
    async with training([COMPLETE]) as cell:
        await cell.leave()
    assert cell.core.done == [COMPLETE]
    assert [claim.version for claim in cell.claims] == [0, 1]


async def test_a_stale_cell_forgets_and_takes_the_version_that_is_there() -> None:
    async with training([lease(1), Stale(version=1)]) as cell:
        await cell.leave()
    assert [type(m) for m in cell.ranks.asked] == [TrainMicroStep, DropGradients]
    assert cell.core.done == [1]
    assert (cell.claims[2].version, cell.claims[2].holds) == (2, ())


async def test_a_cell_that_leaves_hands_over_what_it_holds() -> None:
    async with training([lease(1)]) as cell:
        await cell.leave()
        assert [m.tokens for m in cell.core.done if isinstance(m, Manifest)] == [(1,)]
    assert cell.queue.seen[-1] == StopClaiming(cell=1, incarnation=3)


async def test_a_cell_that_leaves_with_nothing_hands_nothing_over() -> None:
    async with training([]) as cell:
        await cell.leave()
    assert cell.core.done == []


async def test_a_cell_that_leaves_ends_the_micro_step_it_is_at_first() -> None:
    async with training([lease(1)]) as cell:
        reached, gate = cell.ranks.gate(TrainMicroStep)
        await reached.wait()
        leaving = asyncio.create_task(cell.loop.leave())
        await asyncio.sleep(0)
        assert not leaving.done()
        gate.set()
        await leaving
        assert [m.tokens for m in cell.core.done if isinstance(m, Manifest)] == [(1,)]
    assert len(cell.claims) == 1


async def test_a_lease_that_comes_too_late_is_given_back() -> None:
    async with training([lease(1)]) as cell:
        cell.queue.last = lease(2)
        await cell.leave()
    assert cell.given_back == [2]
    assert [m.tokens for m in cell.core.done if isinstance(m, Manifest)] == [(1,)]


async def test_what_does_not_count_is_dropped_and_its_leases_given_back() -> None:
    async with training([lease(1), lease(2), HandOver(step=0), lease(3)]) as cell:
        cell.core.counts = False
        with capture_logs() as logs:
            await cell.leave()
    assert [type(m).__name__ for m in cell.ranks.asked] == [
        "TrainMicroStep",
        "TrainMicroStep",
        "DropGradients",
        "TrainMicroStep",
        "DropGradients",
    ]
    assert cell.given_back == [1, 2, 3]
    assert [claim.holds for claim in cell.claims] == [(), (1,), (1, 2), (), (3,)]
    assert [(e["event"], e["micro_steps"], e["counts"]) for e in logs] == [
        ("contribution", 2, False),
        ("contribution", 1, False),
    ]


async def test_a_micro_step_that_fails_ends_the_loop() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with training([lease(1)]) as cell:
            cell.ranks.fail[TrainMicroStep] = FloatingPointError("micro-step 0.g000000.1: the loss is nan")
            await asyncio.Event().wait()
    assert "0.g000000.1" in str(caught.value.exceptions[0])
    assert cell.core.done == []


async def test_acceptance_is_the_queues() -> None:
    queue = ScriptedQueue(accepts=lambda message: message.manifest.step == 0)
    manifest = Manifest(
        step=0,
        cell=1,
        incarnation=1,
        version=0,
        micro_steps=("a",),
        tokens=(1,),
        checksums=(),
        stats=MicroStepStats(),
    )
    async with Node(name="test") as node:
        ref = await node.spawn(ChildSpec(name="queue", start=lambda: queue))
        assert await accept(ref, manifest)
        queue._accepts = lambda message: bool(1 / 0)
        with pytest.raises(RemoteError, match="ZeroDivisionError"):
            await accept(ref, manifest)
