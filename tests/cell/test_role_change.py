"""A role change: its states, in order, and what a failing one leaves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gyre.actors import RemoteError
from gyre.cell.messages import RoleState, Snapshot, SnapshotKind
from gyre.cell.role_change import TO_ROLLOUT, TO_TRAIN, RoleChange
from gyre.cell.worker_messages import (
    BeginTraining,
    BuildGroup,
    DropGroup,
    EndTraining,
    SleepEngine,
    UpdateEngine,
    WakeEngine,
)
from tests.cell.scripted import Ranks, region

GROUP = BuildGroup(host="127.0.0.1", port=1, prefix="cell1/life1/group1")
TRAINING, PUBLISHED, VERSION = 5, 3, 2
WAKE = [DropGroup(), "pull published", WakeEngine(version=PUBLISHED, region=region("w3")), "release"]
BACK = [EndTraining(), *WAKE]
TRAIN = [
    SleepEngine(),
    GROUP,
    "pull training",
    BeginTraining(version=TRAINING, region=region("w5")),
    "release",
]
ROLLOUT = ["finish", "hand over", *BACK]
NO_MEMORY = RuntimeError("out of memory")


class Change:
    """A change and all that it did, one after another."""

    def __init__(self, *, engine_over_ranks: bool = False, turn_back_after: str | None = None) -> None:
        self.ranks = Ranks()
        self.groups = [GROUP]
        self.told: list[RoleState] = []
        self.pull_fails: list[Exception | None] = []
        self.leased: set[int] = set()
        self._turn_back_after = turn_back_after
        self.change = RoleChange(
            1,
            "r000007",
            VERSION,
            ranks=self.ranks.all,
            group=self._group,
            pull=self._pull,
            release=self._release,
            tell=self._tell,
            turned_back=self._turned_back,
            training=self,
            engine_over_ranks=engine_over_ranks,
        )

    async def finish(self) -> None:
        self.ranks.asked.append("finish")

    async def hand_over(self) -> None:
        self.ranks.asked.append("hand over")

    async def _tell(self, state: RoleState) -> None:
        self.told.append(state)

    def _turned_back(self) -> str | None:
        passed = ["", *(state.state for state in self.told)]
        return "w=9 > C_R=8" if self._turn_back_after in passed else None

    async def _group(self) -> BuildGroup:
        return self.groups.pop(0) if len(self.groups) > 1 else self.groups[0]

    async def _pull(self, kind: SnapshotKind) -> Snapshot:
        self.ranks.asked.append(f"pull {kind}")
        fault = self.pull_fails.pop(0) if self.pull_fails else None
        if fault is not None:
            raise fault
        version = TRAINING if kind == "training" else PUBLISHED
        lease = 7 + len(self.leased)
        self.leased.add(lease)
        return Snapshot(version=version, region=region(f"w{version}"), lease=lease)

    async def _release(self, snapshot: Snapshot) -> None:
        self.ranks.asked.append("release")
        self.leased.remove(snapshot.lease)

    @property
    def done(self) -> list[Any]:
        return self.ranks.asked


async def test_to_train() -> None:
    made = Change()
    changed = await made.change.to_train()
    assert made.done == TRAIN
    assert (changed.cell, changed.role, changed.version) == (1, "train", TRAINING)
    assert list(changed.states_s) == list(TO_TRAIN)
    assert changed.seconds == pytest.approx(sum(changed.states_s.values()), abs=1e-3)
    assert [(state.change, state.cell, state.state, state.cause) for state in made.told] == [
        ("r000007", 1, state, None) for state in TO_TRAIN
    ]


async def test_to_rollout() -> None:
    made = Change()
    changed = await made.change.to_rollout()
    assert made.done == ROLLOUT
    assert (changed.cell, changed.role, changed.version) == (1, "rollout", PUBLISHED)
    assert list(changed.states_s) == list(TO_ROLLOUT)


async def test_ranks_that_are_one_engine_meet_before_it_wakes() -> None:
    made = Change(engine_over_ranks=True)
    changed = await made.change.to_rollout()
    assert made.done == [
        "finish",
        "hand over",
        EndTraining(),
        msgspec.structs.replace(GROUP, engine=True),
        "pull published",
        WakeEngine(version=PUBLISHED, region=region("w3")),
        "release",
    ]
    assert list(changed.states_s)[3:] == ["build_engine", "pull_published_weights", "wake_engines"]
    made.ranks.asked.clear()
    await made.change.to_train()
    assert made.done[:2] == [SleepEngine(), GROUP]


async def test_an_update_changes_no_role() -> None:
    made = Change()
    changed = await made.change.update()
    assert made.done == [
        "pull published",
        UpdateEngine(version=PUBLISHED, region=region("w3")),
        "release",
    ]
    assert (changed.role, changed.version) == ("rollout", PUBLISHED)


@pytest.mark.parametrize(
    ("direction", "failing", "state"),
    [
        ("to_train", SleepEngine, "sleep_engines"),
        ("to_rollout", EndTraining, "end_training"),
        ("to_rollout", DropGroup, "drop_group"),
    ],
)
async def test_a_state_that_cannot_be_undone_is_the_last(direction: str, failing: type, state: str) -> None:
    made = Change()
    made.ranks.fail[failing] = NO_MEMORY
    with pytest.raises(RuntimeError, match="out of memory"):
        await getattr(made.change, direction)()
    assert (made.told[-1].state, made.told[-1].cause) == (state, "out of memory")
    assert made.leased == set()


@pytest.mark.parametrize(
    ("failing", "state", "entered"), [(BuildGroup, "build_group", 2), (BeginTraining, "begin_training", 4)]
)
async def test_a_cell_that_cannot_train_goes_back(failing: type, state: str, entered: int) -> None:
    made = Change()
    made.ranks.fail[failing] = NO_MEMORY
    changed = await made.change.to_train()
    released = ["release"] * (failing is BeginTraining)
    assert made.done == [*TRAIN[:entered], *released, *BACK]
    assert (changed.role, changed.version, changed.outcome) == ("rollout", PUBLISHED, "failed")
    assert changed.cause == f"{state}: out of memory"
    assert [told.state for told in made.told if told.cause] == [state]
    assert made.leased == set()


async def test_a_cell_that_gets_no_training_weights_goes_back() -> None:
    made = Change()
    made.pull_fails = [TimeoutError("the core is busy")]
    changed = await made.change.to_train()
    assert made.done == [*TRAIN[:3], *BACK]
    assert (changed.role, changed.outcome) == ("rollout", "failed")


async def test_a_cell_whose_way_back_fails_has_failed() -> None:
    made = Change()
    made.ranks.fail[BuildGroup] = NO_MEMORY
    made.ranks.fail[WakeEngine] = RuntimeError("no memory either")
    with pytest.raises(RuntimeError, match="no memory either"):
        await made.change.to_train()
    assert made.leased == set()


async def test_engines_that_were_not_woken_are_woken_once_more() -> None:
    made = Change()
    made.pull_fails = [TimeoutError("the core is busy")]
    changed = await made.change.to_rollout()
    assert made.done == [*ROLLOUT[:5], SleepEngine(), *WAKE]
    assert (changed.role, changed.outcome) == ("rollout", "done")
    made = Change()
    made.ranks.fail[WakeEngine] = NO_MEMORY
    with pytest.raises(RuntimeError, match="out of memory"):
        await made.change.to_rollout()
    assert made.ranks.asked.count(SleepEngine()) == 1
    assert made.leased == set()


async def test_engines_that_could_not_be_updated_sleep_and_wake_with_the_weights() -> None:
    made = Change()
    made.ranks.fail[UpdateEngine] = NO_MEMORY
    changed = await made.change.update()
    update = ["pull published", UpdateEngine(version=PUBLISHED, region=region("w3")), "release"]
    assert made.done == [*update, SleepEngine(), *WAKE]
    assert (changed.role, changed.version, changed.outcome) == ("rollout", PUBLISHED, "done")
    made.ranks.fail[WakeEngine] = NO_MEMORY
    with pytest.raises(RuntimeError, match="out of memory"):
        await made.change.update()
    assert made.leased == set()


@pytest.mark.parametrize("after", ["", *TO_TRAIN[:-1]])
async def test_a_change_to_train_turns_back_before_its_next_state(after: str) -> None:
    made = Change(turn_back_after=after)
    changed = await made.change.to_train()
    entered = TO_TRAIN.index(after) + 1 if after else 0
    released = ["release"] * (after == "pull_training_weights")
    back = [*released, *BACK] if after else []
    assert made.done == [*TRAIN[:entered], *back]
    assert (changed.role, changed.outcome, changed.cause) == ("rollout", "turned_back", "w=9 > C_R=8")
    assert changed.version == (PUBLISHED if after else VERSION)
    assert made.leased == set()


@pytest.mark.parametrize("after", ["", *TO_ROLLOUT[:-1]])
async def test_a_change_to_rollout_turns_back_before_its_next_state(after: str) -> None:
    made = Change(turn_back_after=after)
    changed = await made.change.to_rollout()
    entered = TO_ROLLOUT.index(after) + 1 if after else 0
    back = TRAIN if entered > 2 else []
    released = ["release"] * (after == "pull_published_weights")
    assert made.done == [*ROLLOUT[:entered], *released, *back]
    assert (changed.role, changed.outcome) == ("train", "turned_back")
    assert changed.version == (TRAINING if entered > 2 else VERSION)
    assert made.leased == set()


@pytest.mark.parametrize(("direction", "last"), [("to_train", TO_TRAIN[-1]), ("to_rollout", TO_ROLLOUT[-1])])
async def test_a_change_that_is_done_does_not_turn_back(direction: str, last: str) -> None:
    made = Change(turn_back_after=last)
    changed = await getattr(made.change, direction)()
    assert changed.outcome == "done"


UNREACHABLE = RemoteError("torch.distributed:DistNetworkError", "connection refused", "")


def meets(message: BuildGroup) -> None:
    """The ranks, where the store at port 1 is dead."""
    if message.port == 1:
        raise UNREACHABLE


async def test_ranks_meet_again_when_the_store_died_under_them() -> None:
    made = Change()
    made.ranks.answers[BuildGroup] = meets
    made.groups.append(msgspec.structs.replace(GROUP, port=2))
    changed = await made.change.to_train()
    assert [m.port for m in made.done if isinstance(m, BuildGroup)] == [1, 2]
    assert changed.role == "train"


async def test_ranks_that_cannot_meet_at_a_living_store_fail_the_state() -> None:
    made = Change()
    made.ranks.answers[BuildGroup] = meets
    changed = await made.change.to_train()
    assert (changed.role, changed.outcome) == ("rollout", "failed")
    assert "connection refused" in changed.cause
