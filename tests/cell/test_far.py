"""A satellite whose core is on another machine: its regions are in a folder of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from gyre.actors import ActorDied, ChildSpec, Node, Ref, RemoteError
from gyre.cell.actor import CellActorConfig
from gyre.cell.messages import EnterRollout, EnterTrain, GetStatus, Retire, StageContribution, Stale
from gyre.cell.worker_messages import AddShard, BeginTraining, StagedShard, StageGradients, WakeEngine
from gyre.rdma import RegionHandle, SharedMemory
from tests.cell.scripted import Ranks, lease
from tests.cell.test_actor import MANIFEST, Cell, House
from tests.cell.witness import Witness


class FarHouse(House):
    """Its satellite's ranks stage gradients, and find weights, in `far`."""

    def __init__(self, node: Node, shm: Path, tmp_path: Path) -> None:
        super().__init__(node, shm, tmp_path)
        self.far = tmp_path / "far"
        self.far_shared = SharedMemory(self.far)
        self.loaded: list[bytes] = []
        self.added: list[bytes] = []
        near, far = self.ranks
        near.answers[AddShard] = lambda m: self.added.append(self.content(self.shared, m.region))
        far.answers[StageGradients] = lambda m: StagedShard(region=self.stage(far, m.name), checksum=1)
        for kind in (BeginTraining, WakeEngine):
            far.answers[kind] = lambda m: self.loaded.append(self.content(self.far_shared, m.region))

    def write(self, name: str) -> RegionHandle:
        with self.shared.allocate(name, 4) as region:
            region.buffer[:] = b"core"
            return region.handle

    def stage(self, ranks: Ranks, name: str) -> RegionHandle:
        rank = sum(isinstance(asked, StageGradients) for asked in ranks.asked)
        with self.far_shared.allocate(f"{name}-r{rank}-{len(self.far_regions())}", 4) as region:
            region.buffer[:] = b"grad"
            return region.handle

    def content(self, shared: SharedMemory, region: RegionHandle) -> bytes:
        with shared.open(region) as opened:
            return bytes(opened.buffer)

    def content_is(self, content: bytes) -> None:
        (self.shm / "w0").write_bytes(content)

    async def sum(self) -> None:
        core = self.cell(0)._core
        assert core is not None
        await core.snapshots._sum(RegionHandle(backend="shm", name="w0", nbytes=4))

    async def spoil(self) -> None:
        """What was written is not what is read."""
        await self.sum()
        self.content_is(b"c0re")

    def cell(self, number: int) -> Cell:
        actor = self.cells[number].target.actor  # type: ignore[attr-defined]
        assert isinstance(actor, Cell)
        return actor

    def far_regions(self) -> set[str]:
        return {path.name for path in self.far.iterdir()}

    async def start(self) -> None:
        await super().start()
        await self.node.stop(self.cells.pop())
        self.deaths.pop()
        config = CellActorConfig(
            setup=msgspec.structs.replace(self.setup, shm_folder=self.far),
            cell=1,
            waterlevel=self.cells[0],
            queue=self._queue_ref(),
            stores=self.cells[0],
            core=self.cells[0],
            far=True,
        )
        actor = Cell(config, self.ranks[1])
        ref = await self.node.spawn(ChildSpec(name="far", start=lambda: actor, restart="temporary"))
        self.cells.append(ref)
        witness = Witness(ref)
        await self.node.spawn(ChildSpec(name="far-witness", start=lambda: witness))
        self.deaths.append(witness.reason)

    def _queue_ref(self) -> Ref:
        queue = self.node.lookup("queue")
        assert queue is not None
        return queue


@pytest.fixture
async def house(shm: Path, tmp_path: Path) -> AsyncIterator[FarHouse]:
    async with Node(name="test") as node:
        made = FarHouse(node, shm, tmp_path)
        await made.start()
        yield made


async def test_weights_are_brought_to_its_machine_and_freed_when_they_are_loaded(house: FarHouse) -> None:
    for change in (EnterTrain(), EnterRollout()):
        await house.cells[1].ask(change)
    assert house.loaded == [b"core"] * 4
    # Both ranks had it from one copy.
    loads = [asked for asked in house.ranks[1].asked if isinstance(asked, BeginTraining | WakeEngine)]
    assert [load.region.name for load in loads] == ["far-w0-l1", "far-w0-l2"]
    assert house.far_regions() == {"spare-far"}
    await house.cells[0].ask(GetStatus())  # after the releases before it
    assert house.regions() == {"w0"}


async def test_a_corrupt_copy_is_pulled_again_and_never_loaded(house: FarHouse) -> None:
    await house.spoil()

    def heal(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event["event"] == "snapshot_corrupt":
            house.content_is(b"core")
        raise structlog.DropEvent

    structlog.configure(processors=[heal])
    assert (await house.cells[1].ask(EnterTrain())).outcome == "done"
    assert house.loaded == [b"core"] * 2
    assert house.cell(1).summary()["corrupt_snapshots"] == 1
    await house.cells[0].ask(GetStatus())  # after the releases before it
    assert house.leases() == {}


async def test_one_that_goes_before_it_was_copied_is_pulled_again(house: FarHouse) -> None:
    await house.sum()
    away = (house.shm / "w0").rename(house.shm / "spare-w0")

    def heal(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event["event"] == "snapshot_lost":
            away.rename(house.shm / "w0")
        raise structlog.DropEvent

    structlog.configure(processors=[heal])
    assert (await house.cells[1].ask(EnterTrain())).outcome == "done"
    assert house.loaded == [b"core"] * 2
    assert house.cell(1).summary()["corrupt_snapshots"] == 0
    await house.cells[0].ask(GetStatus())  # after the releases before it
    assert house.leases() == {}


async def test_a_copy_that_cannot_be_loaded_is_freed(house: FarHouse) -> None:
    await house.cells[1].ask(EnterTrain())
    await house.queue.drained.wait()
    house.ranks[1].fail[BeginTraining] = RuntimeError("out of memory")
    house.queue.answer(Stale(version=0))
    assert "out of memory" in str(await house.deaths[1])
    assert house.far_regions() == set()
    await house.cells[0].ask(GetStatus())
    assert house.leases() == {}


async def test_a_snapshot_that_stays_corrupt_is_the_cells_end(house: FarHouse) -> None:
    """It cannot go back to rollout either: that would be with the same bytes."""
    await house.spoil()
    with capture_logs() as logs, pytest.raises((RemoteError, ActorDied), match="has checksum 0x"):
        await house.cells[1].ask(EnterTrain())
    assert [line["event"] for line in logs if line["event"] == "snapshot_corrupt"] == ["snapshot_corrupt"] * 9
    assert house.loaded == []
    assert "has checksum 0x" in str(await house.deaths[1])
    await house.cells[0].ask(GetStatus())
    assert house.leases() == {}


async def test_gradients_are_fetched_by_the_core_and_freed_on_both_machines(house: FarHouse) -> None:
    house.queue._script = [lease(1)]
    await house.cells[1].ask(EnterTrain())
    await house.queue.drained.wait()
    await house.cells[1].ask(EnterRollout())
    assert house.added == [b"grad", b"grad"]
    assert house.far_regions() == {"spare-far"}
    assert house.regions() == {"w0"}


async def test_no_loop_waits_while_memory_is_freed(house: FarHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: dict[str, int] = {}
    free = SharedMemory.free

    def watched(shared: SharedMemory, *handles: RegionHandle) -> None:
        freed.update((f"{shared.folder.name}/{handle.name}", threading.get_ident()) for handle in handles)
        free(shared, *handles)

    monkeypatch.setattr(SharedMemory, "free", watched)
    house.queue._script = [lease(1)]
    await house.cells[1].ask(EnterTrain())
    await house.queue.drained.wait()
    await house.cells[1].ask(EnterRollout())
    names = {asked.region.name for _, asked in house.ranks[0].asked if isinstance(asked, AddShard)}
    assert len(names) == 2
    assert {*freed} == {f"{folder.name}/{name}" for name in names for folder in (house.shm, house.far)}
    assert threading.get_ident() not in freed.values()


async def test_one_that_retires_hands_over_first(house: FarHouse) -> None:
    house.queue._script = [lease(1)]
    await house.cells[1].ask(EnterTrain())
    await house.queue.drained.wait()
    await house.cells[1].ask(Retire())
    assert house.added == [b"grad", b"grad"]
    await house.cells[1].ask(Retire())  # nothing is left to hand over
    assert len(house.added) == 2


async def test_a_contribution_that_does_not_come_counts_for_nothing(house: FarHouse) -> None:
    shard = house.stage(house.ranks[1], "g")
    await house.node.stop(house.cells[1])
    stage = StageContribution(manifest=MANIFEST, regions=(shard, shard), holder=house.cells[1])
    with capture_logs() as logs:
        assert not await house.cells[0].ask(stage)
    assert [line["event"] for line in logs] == ["contribution_lost"]
    assert house.added == []
    assert house.regions() == {"w0"}
    assert not house.deaths[0].done()


async def test_what_came_of_a_contribution_is_freed_when_the_rest_does_not(house: FarHouse) -> None:
    shard = house.stage(house.ranks[1], "g")
    gone = msgspec.structs.replace(shard, name="gone")
    stage = StageContribution(manifest=MANIFEST, regions=(shard, gone), holder=house.cells[1])
    async with asyncio.timeout(10.0):
        assert not await house.cells[0].ask(stage)
    assert house.regions() == {"w0"}
