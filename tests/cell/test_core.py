"""The core's part of a cell: snapshots, contributions, commits, checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from structlog.testing import capture_logs

from gyre.actors import ChildSpec, Node
from gyre.cell.checkpoints import CheckpointFolder, check
from gyre.cell.config import WarmStartConfig
from gyre.cell.core import Core
from gyre.cell.messages import Accept, Manifest, StepCommitted, StepComplete
from gyre.cell.worker_messages import (
    AddOwn,
    AddShard,
    BeginTraining,
    CheckShard,
    CommitStep,
    Updated,
    WarmStart,
    WriteCheckpoint,
    WriteSnapshot,
)
from gyre.loss import MicroStepStats
from gyre.rdma import RegionHandle, SharedMemory
from tests.cell.parts import cell_setup
from tests.cell.scripted import Ranks, ScriptedQueue, fill_checkpoint

T = TypeVar("T")

STATS = MicroStepStats(micro_steps=3, trajectories=5)


class House:
    """A core whose ranks write real regions and do nothing else."""

    def __init__(self, shm: Path, checkpoints: Path) -> None:
        self.shm = shm
        self.shared = SharedMemory(shm)
        self.queue = ScriptedQueue()
        self.ranks = Ranks(
            2,
            {
                WriteSnapshot: lambda m: self.write(f"w{m.version}"),
                CommitStep: lambda m: Updated(grad_norm=2.0, lr=0.1, region=self.write(f"w{m.version}")),
                CheckShard: True,
                WriteCheckpoint: fill_checkpoint,
                WarmStart: 0.5,
            },
        )
        self.setup = cell_setup(Path("model"), shm, checkpoints, ranks=2)
        self.core: Core

    def write(self, name: str) -> RegionHandle:
        with self.shared.allocate(name, 4) as region:
            return region.handle

    def run(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        return asyncio.create_task(work, name=name)

    def regions(self) -> set[str]:
        """In use."""
        return {path.name for path in self.shm.iterdir() if not path.name.startswith("spare")}

    def shards(self, cell: int) -> tuple[RegionHandle, ...]:
        return tuple(self.write(f"g-c{cell}-r{rank}") for rank in range(2))

    @property
    def accepted(self) -> list[int]:
        """The cells whose contributions the queue was asked to accept, in order."""
        return [message.manifest.cell for message in self.queue.seen if isinstance(message, Accept)]

    async def commit(self, step: int) -> int:
        return await self.core.commit(complete(step))


@pytest.fixture
async def house(shm: Path, tmp_path: Path) -> AsyncIterator[House]:
    made = House(shm, tmp_path / "checkpoints")
    async with Node(name="test") as node:
        ref = await node.spawn(ChildSpec(name="queue", start=lambda: made.queue, restart="temporary"))
        made.core = Core(made.setup, ref, made.ranks.all, made.ranks.one, made.run, lease_s=60.0)
        yield made


@pytest.fixture
async def core(house: House) -> Core:
    await house.core.first_snapshot(0, resumed=False)
    house.ranks.asked.clear()
    return house.core


def manifest(cell: int, micro_steps: int = 1, step: int = 0) -> Manifest:
    return Manifest(
        step=step,
        cell=cell,
        incarnation=1,
        version=step,
        micro_steps=tuple(f"{step}.g000000.{index}" for index in range(micro_steps)),
        tokens=tuple(range(micro_steps)),
        checksums=() if cell == 0 else (11, 12),
        stats=MicroStepStats(),
    )


def complete(step: int, executions: int = 4) -> StepComplete:
    return StepComplete(step=step, executions=executions, stats=STATS, cells=(0, 1))


# --- snapshots ----------------------------------------------------------------------------------


async def test_who_comes_first_waits_for_the_first_snapshot(house: House) -> None:
    waiting = asyncio.create_task(house.core.snapshots.lease(1, "published"))
    await asyncio.sleep(0)
    assert not waiting.done()
    await house.core.first_snapshot(7, resumed=True)
    assert (await waiting).version == house.core.step == 7


@pytest.mark.parametrize(("resumed", "warm_starts"), [(False, True), (True, False)])
async def test_a_job_is_warm_started_once(house: House, resumed: bool, warm_starts: bool) -> None:
    """Also one that was stopped before its first step."""
    warm = msgspec.structs.replace(house.setup.model, warm_start=WarmStartConfig(demos="a:b"))
    house.core._setup = msgspec.structs.replace(house.setup, model=warm)
    await house.core.first_snapshot(0, resumed=resumed)
    assert (WarmStart() in house.ranks.asked) is warm_starts
    assert WriteSnapshot(version=0) in house.ranks.asked


async def test_regions_of_versions_that_nobody_needs_are_freed(house: House, core: Core) -> None:
    lease = await core.snapshots.lease(1, "published")
    await house.commit(0)
    assert core.snapshots.publish() == 1
    assert house.regions() == {"w0", "w1"}
    core.snapshots.release(lease.lease)
    assert house.regions() == {"w1"}


async def test_a_commit_waits_for_room_on_the_shelf(house: House, core: Core) -> None:
    lease = await core.snapshots.lease(1, "published")
    await house.commit(0)
    core.snapshots.publish()
    await house.commit(1)
    waiting = asyncio.create_task(house.commit(2))
    await asyncio.sleep(0.01)
    assert house.ranks.names.count("CommitStep") == 2
    core.snapshots.release(lease.lease)
    assert await waiting == 3
    assert house.regions() == {"w1", "w3"}


async def test_the_core_takes_the_training_weights_like_any_cell(house: House, core: Core) -> None:
    await house.commit(0)
    house.ranks.asked.clear()
    assert await core.pull(1) == 1
    (begin,) = house.ranks.asked
    assert isinstance(begin, BeginTraining) and begin.region.name == "w1"
    core.snapshots.publish()
    assert house.regions() == {"w1"}


# --- contributions ------------------------------------------------------------------------------


async def test_a_contribution_is_checked_then_journalled_then_added(house: House, core: Core) -> None:
    regions = house.shards(1)
    assert await core.stage(manifest(1), regions)
    assert house.ranks.asked == [
        (0, CheckShard(region=regions[0], checksum=11)),
        (1, CheckShard(region=regions[1], checksum=12)),
        (0, AddShard(region=regions[0])),
        (1, AddShard(region=regions[1])),
    ]
    assert house.accepted == [1]


async def test_nothing_is_added_before_it_is_accepted(house: House, core: Core) -> None:
    asked_before: list[str] = []
    house.queue._accepts = lambda _: asked_before.extend(house.ranks.names) is None
    assert await core.stage(manifest(1), house.shards(1))
    assert asked_before == ["CheckShard@0", "CheckShard@1"]


async def test_a_corrupt_shard_is_refused_whole(house: House, core: Core) -> None:
    house.ranks.answers[CheckShard] = lambda message: message.checksum != 12
    with capture_logs() as logs:
        assert not await core.stage(manifest(1), house.shards(1))
    assert [(e["event"], e["cell"], e["ranks"]) for e in logs] == [("contribution_corrupt", 1, [True, False])]
    assert house.accepted == []
    assert "AddShard@0" not in house.ranks.names


@pytest.mark.parametrize("shards", [0, 1, 3])
async def test_a_contribution_of_another_number_of_ranks_is_refused(
    house: House, core: Core, shards: int
) -> None:
    regions = tuple(house.write(f"g{rank}") for rank in range(shards))
    assert not await core.stage(manifest(1), regions)
    assert house.accepted == []


async def test_a_forfeit_contribution_is_not_added(house: House, core: Core) -> None:
    house.queue._accepts = lambda _: False
    assert not await core.stage(manifest(1), house.shards(1))
    assert not await core.contribute(manifest(0))
    assert house.ranks.names == ["CheckShard@0", "CheckShard@1"]


async def test_what_a_dead_cell_staged_and_could_not_tell_of_is_freed(house: House, core: Core) -> None:
    """By its next life, but not what is being added; nor what others have."""
    before = house.regions()
    house.write("g0-c1-i1-t7-r0")
    house.write("g0-c11-i1-t7-r0")
    reached, gate = house.ranks.gate(AddShard)
    told = tuple(house.write(f"g0-c1-i1-t8-r{rank}") for rank in range(2))
    staging = asyncio.create_task(core.stage(manifest(1), told))
    await reached.wait()
    await core.forget(1)
    assert house.regions() - before == {"g0-c11-i1-t7-r0", "g0-c1-i1-t8-r0", "g0-c1-i1-t8-r1"}
    gate.set()
    assert await staging
    assert house.regions() - before == {"g0-c11-i1-t7-r0"}


@pytest.mark.parametrize("counts", [True, False])
async def test_regions_of_a_contribution_are_freed_either_way(house: House, core: Core, counts: bool) -> None:
    house.queue._accepts = lambda _: counts
    await core.stage(manifest(1), house.shards(1))
    assert house.regions() == {"w0"}


async def test_a_contribution_that_comes_twice_is_added_once(house: House, core: Core) -> None:
    assert await core.stage(manifest(1), house.shards(1))
    assert await core.stage(manifest(1), house.shards(1))
    assert house.ranks.names.count("AddShard@0") == 1
    assert house.accepted == [1]
    await house.commit(0)
    assert not [name for name in house.regions() if name.startswith("g-c")]


async def test_contributions_are_added_one_after_another(house: House, core: Core) -> None:
    reached, gate = house.ranks.gate(AddShard)
    first = asyncio.create_task(core.stage(manifest(1), house.shards(1)))
    await reached.wait()
    second = asyncio.create_task(core.stage(manifest(2), house.shards(2)))
    third = asyncio.create_task(core.contribute(manifest(0)))
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(first, second, third) == [True, True, True]
    assert house.accepted == [1, 2, 0]
    whole = ["CheckShard@0", "CheckShard@1", "AddShard@0", "AddShard@1"]
    assert house.ranks.names == [*whole, *whole, "AddOwn"]


async def test_the_cores_own_contribution_is_added_in_place(house: House, core: Core) -> None:
    assert await core.contribute(manifest(0))
    assert house.accepted == [0]
    assert house.ranks.asked == [AddOwn()]


# --- commits ------------------------------------------------------------------------------------


async def test_a_step_is_committed_as_the_mean_of_its_executions(house: House, core: Core) -> None:
    await core.contribute(manifest(0, 2))
    await core.stage(manifest(1, 1), house.shards(1))
    await core.stage(manifest(1, 3), house.shards(1))
    assert await house.commit(0) == core.step == 1
    assert house.ranks.asked[-1] == CommitStep(version=1, scale=0.25)
    committed = await house.queue.committed.get()
    assert msgspec.structs.replace(committed, seconds=0.0) == StepCommitted(
        step=0,
        version=1,
        grad_norm=2.0,
        lr=0.1,
        seconds=0.0,
        stats=STATS,
        cells=(0, 1),
        micro_steps_by_cell={0: 2, 1: 4},
    )


async def test_the_next_step_begins_at_nothing(house: House, core: Core) -> None:
    await core.contribute(manifest(0, 2))
    await house.commit(0)
    await core.stage(manifest(2, 1, step=1), house.shards(2))
    await house.commit(1)
    done = [await house.queue.committed.get() for _ in range(2)]
    assert [committed.micro_steps_by_cell for committed in done] == [{0: 2}, {2: 1}]


async def test_a_step_without_executions_is_committed(house: House, core: Core) -> None:
    assert await core.commit(complete(0, executions=0)) == 1
    assert house.ranks.asked[-1] == CommitStep(version=1, scale=1.0)


async def test_a_commit_waits_for_what_is_being_added(house: House, core: Core) -> None:
    reached, gate = house.ranks.gate(AddShard)
    staging = asyncio.create_task(core.stage(manifest(1), house.shards(1)))
    await reached.wait()
    committing = asyncio.create_task(house.commit(0))
    await asyncio.sleep(0)
    assert "CommitStep" not in house.ranks.names
    gate.set()
    assert await staging and await committing == 1


# --- checkpoints --------------------------------------------------------------------------------


async def test_a_checkpoint_is_of_the_last_committed_step(house: House, core: Core) -> None:
    await house.commit(0)
    folder = await core.save_checkpoint()
    assert check(folder) == 1
    (write,) = [m for m in house.ranks.asked if isinstance(m, WriteCheckpoint)]
    assert write.region.name == "w1"
    core.snapshots.publish()
    assert house.regions() == {"w1"}


async def test_a_checkpoint_that_fails_leaves_what_there_was(
    house: House, core: Core, tmp_path: Path
) -> None:
    first = await core.save_checkpoint()
    await house.commit(0)
    house.ranks.fail[WriteCheckpoint] = OSError("no space left on device")
    with pytest.raises(OSError, match="no space"):
        await core.save_checkpoint()
    assert CheckpointFolder(tmp_path / "checkpoints", keep=2).newest_whole() == first


async def test_a_checkpoint_that_fails_holds_no_snapshot(house: House, core: Core) -> None:
    """A lease that nobody gives back would take the room of a later step."""
    house.ranks.fail[WriteCheckpoint] = OSError("no space left on device")
    with pytest.raises(OSError, match="no space"):
        await core.save_checkpoint()
    for step in range(4):
        await house.commit(step)
        core.snapshots.publish()
    assert house.regions() == {"w4"}


async def test_nothing_is_added_while_a_checkpoint_is_written(house: House, core: Core) -> None:
    reached, gate = house.ranks.gate(WriteCheckpoint)
    saving: asyncio.Task[Any] = asyncio.create_task(core.save_checkpoint())
    await reached.wait()
    staging = asyncio.create_task(core.stage(manifest(1), house.shards(1)))
    await asyncio.sleep(0)
    assert house.accepted == []
    gate.set()
    await saving
    assert await staging
