"""Any course of role changes, failures and opposite orders: a cell is whole in the role it says, or ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.actors import Ask
from gyre.cell.messages import RoleChanged, RoleState, Snapshot, SnapshotKind
from gyre.cell.role_change import TO_ROLLOUT, TO_TRAIN, RoleChange
from gyre.cell.worker_messages import (
    BeginTraining,
    BuildGroup,
    DropGroup,
    EndTraining,
    SleepEngine,
    WakeEngine,
)
from tests.cell.scripted import region

RANKS = 2
VERSIONS = {"training": 5, "published": 3}


class Fault(RuntimeError):
    """One that was made."""


@dataclass
class ModelRank:
    """What a rank has. It refuses what a real one would."""

    one_engine: bool
    awake: int | None = 3
    trains: int | None = None
    group: bool = False
    team: bool = True

    def take(self, message: Ask[Any]) -> None:
        match message:
            case SleepEngine():
                self.awake, self.team = None, False
            case BuildGroup(engine=engine):
                assert self.awake is None
                self.group, self.team = not engine, engine
            case DropGroup():
                self.group = False
            case BeginTraining(version=version):
                assert self.group and self.awake is None
                self.trains = version
            case EndTraining():
                self.trains = None
            case WakeEngine(version=version):
                assert self.trains is None and not self.group
                assert self.team or not self.one_engine
                if self.awake is not None:
                    raise RuntimeError("the engine is awake")
                self.awake = version


@dataclass
class ModelCell:
    """`faults` are the numbers of the asks and pulls that fail, when so many ranks did their part."""

    one_engine: bool
    faults: dict[int, int]
    ranks: list[ModelRank] = field(default_factory=list)
    leases: set[int] = field(default_factory=set)
    told: list[RoleState] = field(default_factory=list)
    role: str = "rollout"
    loop: Literal["runs", "left", "none"] = "none"
    asked: int = 0

    def __post_init__(self) -> None:
        self.ranks = [ModelRank(self.one_engine) for _ in range(RANKS)]

    async def all(self, message: Ask[Any]) -> list[Any]:
        done = self._next_fault()
        for rank in self.ranks[:done]:
            rank.take(message)
        if done is not None:
            raise Fault
        return [None] * RANKS

    async def pull(self, kind: SnapshotKind) -> Snapshot:
        if self._next_fault() is not None:
            raise Fault
        self.leases.add(self.asked)
        return Snapshot(version=VERSIONS[kind], region=region(), lease=self.asked)

    def _next_fault(self) -> int | None:
        self.asked += 1
        return self.faults.get(self.asked)

    async def group(self) -> BuildGroup:
        return BuildGroup(host="127.0.0.1", port=1, prefix=f"group{self.asked}")

    async def release(self, snapshot: Snapshot) -> None:
        self.leases.remove(snapshot.lease)

    async def tell(self, state: RoleState) -> None:
        self.told.append(state)

    async def finish(self) -> None:
        self.loop = "left"

    async def hand_over(self) -> None:
        assert self.loop == "left"

    async def change(self, turn_back_after: int | None) -> RoleChanged:
        """To the other role. Raises Fault where the cell ends."""
        self.told.clear()

        def turned_back() -> str | None:
            return None if turn_back_after is None or len(self.told) < turn_back_after else "opposite"

        change = RoleChange(
            1,
            "r000001",
            VERSIONS["published" if self.role == "rollout" else "training"],
            ranks=self.all,
            group=self.group,
            pull=self.pull,
            release=self.release,
            tell=self.tell,
            turned_back=turned_back,
            training=self,
            engine_over_ranks=self.one_engine,
        )
        changed = await (change.to_train() if self.role == "rollout" else change.to_rollout())
        self.role = changed.role
        if changed.role == "rollout":
            self.loop = "none"
        elif self.loop != "runs":
            self.loop = "runs"
        return changed

    def assert_whole(self, changed: RoleChanged) -> None:
        for rank in self.ranks:
            if self.role == "rollout":
                assert (rank.awake, rank.trains, rank.group) == (VERSIONS["published"], None, False)
                assert rank.team or not self.one_engine
            else:
                assert (rank.awake, rank.trains, rank.group) == (None, VERSIONS["training"], True)
        assert changed.version == VERSIONS["published" if self.role == "rollout" else "training"]
        assert not self.leases
        assert set(changed.states_s) == {state.state for state in self.told}


@settings(max_examples=400, deadline=None)
@given(
    one_engine=st.booleans(),
    faults=st.dictionaries(st.integers(1, 40), st.integers(0, RANKS), max_size=5),
    turns=st.lists(st.none() | st.integers(0, 6), min_size=1, max_size=6),
)
def test_a_cell_is_whole_in_its_role_or_ends(
    one_engine: bool, faults: dict[int, int], turns: list[int | None]
) -> None:
    asyncio.run(_course(ModelCell(one_engine, faults), turns))


async def _course(cell: ModelCell, turns: list[int | None]) -> None:
    for turn_back_after in turns:
        before = cell.role
        try:
            changed = await cell.change(turn_back_after)
        except Fault:
            assert any(state.cause is not None for state in cell.told)
            assert not cell.leases
            return
        cell.assert_whole(changed)
        failed = [state.state for state in cell.told if state.cause is not None]
        match changed.outcome:
            case "done":
                assert cell.role != before
                assert before == "train" or not failed
            case "turned_back":
                assert cell.role == before and turn_back_after is not None
            case "failed":
                assert cell.role == before == "rollout" and failed
        forward = TO_TRAIN if before == "rollout" else TO_ROLLOUT
        if changed.outcome == "done" and not failed and not cell.one_engine:
            assert tuple(state.state for state in cell.told) == forward
