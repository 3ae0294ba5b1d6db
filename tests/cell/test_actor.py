"""CellActor over ranks that only write down what they are asked. With real ones: test_cell_two_ranks.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.actors import Actor, ActorDied, Ask, ChildSpec, Down, ExitReason, Node, Ref, RemoteError, handles
from gyre.actors.errors import error_name
from gyre.cell.actor import CellActor, CellActorConfig
from gyre.cell.engine.base import EngineMetrics
from gyre.cell.messages import (
    CellUp,
    EnterRollout,
    EnterTrain,
    GetSnapshot,
    GetStatus,
    Manifest,
    Publish,
    ReleaseSnapshot,
    StageContribution,
    Stale,
    TurnBack,
    UpdateWeights,
)
from gyre.cell.store import Rendezvous, StoreAddress
from gyre.cell.worker_messages import (
    AddShard,
    BeginTraining,
    BuildGroup,
    CheckShard,
    EndTraining,
    GetRankStatus,
    Loaded,
    LoadModel,
    RankStatus,
    SleepEngine,
    StagedShard,
    StageGradients,
    TrainMicroStep,
    WakeEngine,
    WriteSnapshot,
)
from gyre.loss import MicroStepStats
from gyre.rdma import RegionError, RegionHandle, SharedMemory
from tests.cell.parts import cell_setup
from tests.cell.scripted import Ranks, ScriptedQueue, lease
from tests.cell.witness import Witness

MANIFEST = Manifest(
    step=0,
    cell=1,
    incarnation=1,
    version=0,
    micro_steps=("0.g000000.0",),
    tokens=(1,),
    checksums=(11, 12),
    stats=MicroStepStats(),
)


class Meeting(Rendezvous):
    """At a store that nobody asks for."""

    async def _store(self) -> StoreAddress:
        return StoreAddress(host="127.0.0.1", port=1)


class Cell(CellActor):
    """Its ranks are not started."""

    def __init__(self, config: CellActorConfig, ranks: Ranks) -> None:
        self.ranks = ranks
        super().__init__(config)

    async def started(self) -> None:
        self._rendezvous = Meeting(self.context.ref, "", 1.0)
        if self._core is not None:
            await self._core.first_snapshot(0, resumed=False)
        self.ranks.asked.clear()

    async def _ask_ranks(self, message: Ask[Any], timeout_s: float = 0.0) -> list[Any]:
        return await self.ranks.all(message)

    async def _ask_rank(self, rank: int, message: Ask[Any]) -> Any:
        return await self.ranks.one(rank, message)


class Joining(Cell):
    """It joins, with ranks that other actors stand for."""

    def __init__(self, config: CellActorConfig, ranks: Ranks, stand_ins: list[Ref]) -> None:
        super().__init__(config, ranks)
        self._stand_ins = stand_ins

    async def started(self) -> None:
        self._rendezvous = Meeting(self.context.ref, "", 1.0)
        self.context.run(self._join(), name="join")

    async def _spawn_rank(self, rank: int) -> Ref:
        return self._stand_ins[rank]


class Ears(Actor):
    """Hears that a cell is up."""

    def __init__(self) -> None:
        self.up: asyncio.Future[CellUp] = asyncio.get_running_loop().create_future()

    @handles(CellUp)
    async def cell_up(self, message: CellUp) -> None:
        self.up.set_result(message)


class House:
    """A core and a satellite whose regions are real."""

    def __init__(self, node: Node, shm: Path, tmp_path: Path) -> None:
        self.node = node
        self.shared = SharedMemory(shm)
        self.shm = shm
        self.queue = ScriptedQueue()
        self.setup = cell_setup(Path("model"), shm, tmp_path / "checkpoints", ranks=2)
        metrics = EngineMetrics(running=2, generated_tokens=50)
        self.ranks = [
            Ranks(
                2,
                {
                    WriteSnapshot: lambda m: self.write(f"w{m.version}"),
                    CheckShard: True,
                    StageGradients: lambda m: StagedShard(region=self.write(m.name), checksum=1),
                    GetRankStatus: RankStatus(engine=metrics, train_busy_s=0.0, trained_tokens=0),
                },
            )
            for _ in range(2)
        ]
        self.cells: list[Ref] = []
        self.deaths: list[asyncio.Future[ExitReason]] = []

    def write(self, name: str) -> RegionHandle:
        with self.shared.allocate(name, 4) as region:
            return region.handle

    async def start(self) -> None:
        queue = await self.node.spawn(ChildSpec(name="queue", start=lambda: self.queue, restart="temporary"))
        for cell, ranks in enumerate(self.ranks):
            config = CellActorConfig(
                setup=self.setup,
                cell=cell,
                waterlevel=queue,
                queue=queue,
                stores=queue,
                core=self.cells[0] if cell else None,
            )
            actor = Cell(config, ranks)
            ref = await self.node.spawn(
                ChildSpec(name=f"cell-{cell}", start=lambda actor=actor: actor, restart="temporary")
            )
            self.cells.append(ref)
            witness = Witness(ref)
            await self.node.spawn(ChildSpec(name=f"witness-{cell}", start=lambda witness=witness: witness))
            self.deaths.append(witness.reason)

    def contribution(self, token: int = 1) -> StageContribution:
        manifest = msgspec.structs.replace(MANIFEST, tokens=(token,))
        return StageContribution(manifest=manifest, regions=(self.write("g-r0"), self.write("g-r1")))

    def leases(self) -> dict[int, Any]:
        core = self.node.lookup("cell-0").target.actor._core  # type: ignore[union-attr]
        leases: dict[int, Any] = core.snapshots._shelf._leases
        return leases

    def regions(self) -> set[str]:
        """In use."""
        return {path.name for path in self.shm.iterdir() if not path.name.startswith("spare")}


@pytest.fixture
async def house(shm: Path, tmp_path: Path) -> AsyncIterator[House]:
    async with Node(name="test") as node:
        made = House(node, shm, tmp_path)
        await made.start()
        yield made


async def test_a_cell_changes_its_role_and_back(house: House) -> None:
    cell = house.cells[1]
    changed = await cell.ask(EnterTrain())
    assert (changed.cell, changed.role, changed.version) == (1, "train", 0)
    assert (await cell.ask(GetStatus())).role == "train"
    changed = await cell.ask(EnterRollout())
    assert changed.role == "rollout"
    assert house.ranks[1].names == [
        "SleepEngine",
        "BuildGroup",
        "BeginTraining",
        "GetRankStatus",
        "EndTraining",
        "DropGroup",
        "WakeEngine",
    ]
    await cell.ask(EnterTrain())
    groups = [m.prefix for m in house.ranks[1].asked if isinstance(m, BuildGroup)]
    assert groups == ["/group1", "/group2"]


async def test_a_cell_in_train_role_claims_and_hands_over_before_it_returns(house: House) -> None:
    house.queue._script = [lease(1)]
    await house.cells[1].ask(EnterTrain())
    await house.queue.drained.wait()
    await house.cells[1].ask(EnterRollout())
    assert house.ranks[1].names[3:6] == ["TrainMicroStep", "StageGradients", "EndTraining"]
    assert house.ranks[0].names == ["CheckShard@0", "CheckShard@1", "AddShard@0", "AddShard@1"]
    assert (await house.cells[1].ask(GetStatus())).micro_steps == 1
    assert house.regions() == {"w0"}


async def test_a_snapshot_is_released_when_it_is_loaded(house: House) -> None:
    for change in (EnterTrain(), EnterRollout(), UpdateWeights()):
        await house.cells[1].ask(change)
    # Answered after the releases before it.
    await house.cells[0].ask(GetStatus())
    assert house.leases() == {}


@pytest.mark.parametrize("failing", [SleepEngine, WakeEngine])
async def test_a_change_that_fails_is_the_cells_end(house: House, failing: type) -> None:
    house.ranks[1].fail[failing] = RuntimeError("out of memory")
    with pytest.raises((RemoteError, ActorDied), match="out of memory"):
        await house.cells[1].ask(EnterTrain())
        await house.cells[1].ask(EnterRollout())
    assert "out of memory" in str(await house.deaths[1])
    assert not house.deaths[0].done()


async def test_a_cell_that_went_back_three_times_in_a_row_ends(house: House) -> None:
    ranks, cell = house.ranks[1], house.cells[1]

    async def try_to_train(*, fails: bool) -> str:
        ranks.fail = {BeginTraining: RuntimeError("out of memory")} if fails else {}
        return (await cell.ask(EnterTrain())).outcome

    assert [await try_to_train(fails=True) for _ in range(2)] == ["failed"] * 2
    assert (await cell.ask(GetStatus())).role == "rollout"
    assert await try_to_train(fails=False) == "done"
    assert (await cell.ask(EnterRollout())).role == "rollout"
    assert [await try_to_train(fails=True) for _ in range(2)] == ["failed"] * 2
    with pytest.raises((RemoteError, ActorDied), match="3 role changes failed in a row"):
        await try_to_train(fails=True)
    assert "out of memory" in str(await house.deaths[1])


async def test_a_core_that_gives_no_weights_in_time_sends_the_cell_back(house: House) -> None:
    core = house.node.lookup("cell-0").target.actor._core  # type: ignore[union-attr]
    core.snapshots._ready.clear()
    cell = house.node.lookup("cell-1").target.actor  # type: ignore[union-attr]
    cell._config = msgspec.structs.replace(cell._config, pull_timeout_s=0.1)
    asking = asyncio.create_task(house.cells[1].ask(EnterTrain(change="r000001")))
    assert await house.queue.told("pull_training_weights") == "the core gave no weights within 0.1 s"
    core.snapshots._ready.set()
    changed = await asking
    assert (changed.role, changed.outcome) == ("rollout", "failed")
    assert house.ranks[1].names[-1] == "WakeEngine"
    assert not house.deaths[1].done()


async def test_a_cell_that_trains_and_whose_lease_was_ended_pulls_again(house: House) -> None:
    cell, ranks = house.cells[1], house.ranks[1]
    await cell.ask(EnterTrain())
    await house.queue.drained.wait()
    losses = [RemoteError(error_name(RegionError), "region w0: was taken back while it was in use", "")]

    def load(message: BeginTraining) -> None:
        if losses:
            raise losses.pop()

    ranks.answers[BeginTraining] = load
    house.queue.answer(Stale(version=0))
    await house.queue.drained.wait()
    assert ranks.names.count("BeginTraining") == 3
    assert not house.deaths[1].done()
    await house.cells[0].ask(GetStatus())  # after the releases before it
    assert house.leases() == {}


async def test_one_that_cannot_load_what_it_pulls_ends_and_leases_nothing(house: House) -> None:
    await house.cells[1].ask(EnterTrain())
    await house.queue.drained.wait()
    house.ranks[1].fail[BeginTraining] = RegionError("w0", "was taken back while it was in use")
    house.queue.answer(Stale(version=0))
    assert "w0: was taken back" in str(await house.deaths[1])
    assert house.ranks[1].names.count("BeginTraining") == 3
    await house.cells[0].ask(GetStatus())
    assert house.leases() == {}


async def test_an_opposite_order_turns_a_change_back_and_not_the_next(house: House) -> None:
    reached, gate = house.ranks[1].gate(BuildGroup)
    asking = asyncio.create_task(house.cells[1].ask(EnterTrain(change="r000001")))
    await reached.wait()
    await house.cells[1].tell(TurnBack(change="r000001", cause="w=9 > C_R=8"))
    # Handled after it.
    await house.cells[1].ask(GetStatus())
    cell = house.node.lookup("cell-1").target.actor  # type: ignore[union-attr]
    assert cell.summary()["state"] == "build_group"
    gate.set()
    changed = await asking
    assert cell.summary()["state"] is None
    assert (changed.role, changed.outcome, changed.cause) == ("rollout", "turned_back", "w=9 > C_R=8")
    assert (await house.cells[1].ask(EnterTrain(change="r000002"))).outcome == "done"


async def test_a_cell_that_turns_back_to_train_claims_again(house: House) -> None:
    house.queue._script = [lease(1)]
    cell = house.cells[1]
    await cell.ask(EnterTrain())
    await house.queue.drained.wait()
    reached, gate = house.ranks[1].gate(EndTraining)
    asking = asyncio.create_task(cell.ask(EnterRollout(change="r000002")))
    await reached.wait()
    house.queue.drained.clear()
    await cell.tell(TurnBack(change="r000002", cause="w=4 <= C_R-C_e = 8-4"))
    await cell.ask(GetStatus())
    gate.set()
    assert (await asking).role == "train"
    await house.queue.drained.wait()
    assert (await cell.ask(GetStatus())).micro_steps == 1
    assert house.ranks[0].names.count("AddShard@0") == 1


async def test_a_change_that_is_given_up_is_the_cells_end(house: House) -> None:
    reached, _ = house.ranks[1].gate(BeginTraining)
    asking = asyncio.create_task(house.cells[1].ask(EnterTrain()))
    await reached.wait()
    asking.cancel()
    assert "cell 1: a role change took too long" in str(await house.deaths[1])


async def test_a_micro_step_that_fails_is_the_cells_end(house: House) -> None:
    house.queue._script = [lease(1)]
    house.ranks[1].fail[TrainMicroStep] = FloatingPointError("micro-step 0.g000000.1: the loss is nan")
    await house.cells[1].ask(EnterTrain())
    assert "micro-step 0.g000000.1" in str(await house.deaths[1])


async def test_a_rank_that_dies_is_the_cells_end(house: House) -> None:
    cell = house.cells[1].target
    reason = ExitReason(kind="signal", message="killed by SIGKILL")
    cell.deliver(Down(ref=house.cells[0], reason=reason))  # type: ignore[attr-defined]
    assert "a rank died" in str(await house.deaths[1])


async def test_a_contribution_is_added_whole_though_its_sender_died(house: House) -> None:
    reached, gate = house.ranks[0].gate(AddShard)
    asking = asyncio.create_task(house.cells[0].ask(house.contribution()))
    await reached.wait()
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    gate.set()
    # Serial with it.
    assert await house.cells[0].ask(house.contribution(2))
    whole = ["CheckShard@0", "CheckShard@1", "AddShard@0", "AddShard@1"]
    assert house.ranks[0].names == [*whole, *whole]
    assert house.regions() == {"w0"}


async def test_a_contribution_that_was_accepted_and_cannot_be_added_is_the_cores_end(house: House) -> None:
    """Else the step would be committed without it."""
    house.ranks[0].fail[AddShard] = RuntimeError("no memory left")
    with pytest.raises((RemoteError, ActorDied), match="no memory left"):
        await house.cells[0].ask(house.contribution())
    assert "no memory left" in str(await house.deaths[0])


@pytest.mark.parametrize("message", [GetSnapshot(cell=2, kind="training"), Publish()])
async def test_a_satellite_serves_no_weights(house: House, message: Ask[Any]) -> None:
    with pytest.raises(RemoteError, match="cell 1 is not the core"):
        await house.cells[1].ask(message)


async def test_the_core_leases_snapshots(house: House) -> None:
    snapshot = await house.cells[0].ask(GetSnapshot(cell=2, kind="published"))
    assert (snapshot.version, snapshot.region.name) == (0, "w0")
    await house.cells[0].tell(ReleaseSnapshot(lease=snapshot.lease))
    assert await house.cells[0].ask(Publish()) == 0


async def test_status_is_the_sum_of_the_ranks(house: House) -> None:
    status = await house.cells[1].ask(GetStatus())
    assert (status.cell, status.version) == (1, -1)
    assert (status.engine.running, status.engine.generated_tokens) == (4, 100)
    assert status.tokens_per_s > 0.0
    assert (await house.cells[1].ask(GetStatus())).tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("engine", "parallel", "engines", "meet"),
    [("native", "data", 2, False), ("native", "tensor", 1, True), ("sglang", "tensor", 1, False)],
)
async def test_calls_go_to_every_rank_or_to_the_one_that_leads(
    house: House, engine: str, parallel: str, engines: int, meet: bool
) -> None:
    rollout = msgspec.structs.replace(house.setup.rollout, engine=engine, parallel=parallel)
    ears = Ears()
    heard = await house.node.spawn(ChildSpec(name="ears", start=lambda: ears))
    config = CellActorConfig(
        setup=msgspec.structs.replace(house.setup, rollout=rollout),
        cell=2,
        waterlevel=heard,
        queue=heard,
        stores=heard,
        core=house.cells[0],
    )
    loaded = Loaded(weights_bytes=4, parameters=1, step=0, window_tokens=100)
    ranks = Ranks(2, {LoadModel: loaded})
    cell = Joining(config, ranks, house.cells)
    await house.node.spawn(ChildSpec(name="cell-2", start=lambda: cell))
    up = await ears.up
    assert up.engines == tuple(house.cells[:engines])
    assert (up.version, up.window_tokens) == (0, 100)
    assert [message for message in ranks.asked if isinstance(message, BuildGroup)] == [
        BuildGroup(host="127.0.0.1", port=1, prefix="/group1", engine=True)
    ] * meet
