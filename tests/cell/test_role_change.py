"""A role change: its states, in order, and what a failing one leaves."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from gyre.actors import RemoteError
from gyre.cell.messages import Snapshot
from gyre.cell.role_change import RoleChange
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
TRAINING, PUBLISHED = 5, 3


class Change:
    """A change and all that it did, one after another."""

    def __init__(self, *, engine_over_ranks: bool = False) -> None:
        self.ranks = Ranks()
        self.groups = [GROUP]
        self.change = RoleChange(
            1,
            ranks=self.ranks.all,
            group=self._group,
            pull=self._pull,
            release=self._release,
            engine_over_ranks=engine_over_ranks,
        )

    async def _group(self) -> BuildGroup:
        return self.groups.pop(0) if len(self.groups) > 1 else self.groups[0]

    async def _pull(self, kind: Literal["training", "published"]) -> Snapshot:
        self.ranks.asked.append(f"pull {kind}")
        version = TRAINING if kind == "training" else PUBLISHED
        return Snapshot(version=version, region=region(f"w{version}"), lease=7)

    async def _release(self, snapshot: Snapshot) -> None:
        self.ranks.asked.append(f"release {snapshot.lease}")

    @property
    def done(self) -> list[Any]:
        return self.ranks.asked


async def test_to_train() -> None:
    made = Change()
    changed = await made.change.to_train()
    assert made.done == [
        SleepEngine(),
        GROUP,
        "pull training",
        BeginTraining(version=TRAINING, region=region("w5")),
        "release 7",
    ]
    assert (changed.cell, changed.role, changed.version) == (1, "train", TRAINING)
    assert list(changed.states_s) == ["sleep_engines", "build_group", "pull_weights", "begin_training"]
    assert changed.seconds == pytest.approx(sum(changed.states_s.values()), abs=1e-3)
    assert made.change.state == "done"


async def test_to_rollout() -> None:
    made = Change()
    changed = await made.change.to_rollout()
    assert made.done == [
        EndTraining(),
        DropGroup(),
        "pull published",
        WakeEngine(version=PUBLISHED, region=region("w3")),
        "release 7",
    ]
    assert (changed.cell, changed.role, changed.version) == (1, "rollout", PUBLISHED)
    assert list(changed.states_s) == ["end_training", "drop_group", "pull_weights", "wake_engines"]


async def test_ranks_that_are_one_engine_meet_before_it_wakes() -> None:
    made = Change(engine_over_ranks=True)
    changed = await made.change.to_rollout()
    assert made.done == [
        EndTraining(),
        msgspec.structs.replace(GROUP, engine=True),
        "pull published",
        WakeEngine(version=PUBLISHED, region=region("w3")),
        "release 7",
    ]
    assert list(changed.states_s) == ["end_training", "build_engine", "pull_weights", "wake_engines"]
    made.ranks.asked.clear()
    await made.change.to_train()
    assert made.done[:2] == [SleepEngine(), GROUP]


async def test_an_update_changes_no_role() -> None:
    made = Change()
    changed = await made.change.update()
    assert made.done == [
        "pull published",
        UpdateEngine(version=PUBLISHED, region=region("w3")),
        "release 7",
    ]
    assert (changed.role, changed.version) == ("rollout", PUBLISHED)


@pytest.mark.parametrize(
    ("direction", "failing", "state", "done"),
    [
        ("to_train", SleepEngine, "sleep_engines", 1),
        ("to_train", BuildGroup, "build_group", 2),
        ("to_train", BeginTraining, "begin_training", 4),
        ("to_rollout", EndTraining, "end_training", 1),
        ("to_rollout", WakeEngine, "wake_engines", 4),
        ("update", UpdateEngine, "update_engines", 2),
    ],
)
async def test_a_state_that_fails_is_the_last(direction: str, failing: type, state: str, done: int) -> None:
    made = Change()
    made.ranks.fail[failing] = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        await getattr(made.change, direction)()
    assert made.change.state == state
    assert len(made.done) == done


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


async def test_ranks_that_cannot_meet_at_a_living_store_fail_the_change() -> None:
    made = Change()
    made.ranks.answers[BuildGroup] = meets
    with pytest.raises(RemoteError) as raised:
        await made.change.to_train()
    assert raised.value is UNREACHABLE
    assert made.change.state == "build_group"
