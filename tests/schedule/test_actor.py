from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from gyre.actors import ActorDied, Node
from gyre.schedule.actor import WaterlevelActorConfig
from gyre.schedule.messages import Drain, GetSchedule, WaitFinished
from gyre.schedule.policy import PolicyConfig
from tests.schedule.world import GROUP_SIZE, Notes, World

CONFIG = WaterlevelActorConfig(
    policy=PolicyConfig(groups_per_step=2, group_size=GROUP_SIZE, eval_every=2),
    cells=3,
    steps=2,
    checkpoint_every_steps=2,
)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with Node(name="test") as node:
        yield World(node, Notes())


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as captured:
        yield captured


async def started(world: World, **changes: Any) -> Notes:
    """Three cells in rollout role, the first burst of 8 executions and no evaluation under way."""
    policy = msgspec.structs.replace(CONFIG.policy, eval_every=0)
    await world.start(msgspec.structs.replace(CONFIG, policy=policy, **{"status_timeout_s": 0.05, **changes}))
    for cell in range(3):
        await world.up(cell)
        await world.notes.next("open_route", cell, 1)
    return world.notes


def of(logs: list[Any], event: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] == event]


async def test_a_whole_job_runs_to_its_end(world: World, logs: list[Any]) -> None:
    await world.start(CONFIG)
    notes = world.notes
    over = asyncio.create_task(world.waterlevel.ask(WaitFinished(), timeout_s=50.0))
    await world.up(0)
    await notes.next("dispatch", "eval", 0, 0)
    await notes.next("dispatch", "train", 2, 0)
    await world.up(1)
    await world.up(2)
    await notes.next("open_route", 2, 1)
    await world.evaluated(0)
    for step in (0, 1):
        await world.finish(4)
        await world.ready(step, 3)
        await notes.next("close_route", 0, False)
        await notes.next("enter_train", 0)
        await world.finish(4)
        await notes.next("enter_train", 1)
        await notes.next("enter_train", 2)
        await world.ready(step, 0, complete=True)
        await world.done(step)
        await notes.next("publish")
        if step == 0:
            for cell in (2, 1, 0):
                await notes.next("enter_rollout", cell)
                await notes.next("open_route", cell, 1)
            await notes.next("dispatch", "train", 2, 1)
    await notes.next("enter_rollout", 0)
    await notes.next("dispatch", "eval", 0, 2)
    assert not over.done()
    await world.evaluated(2)
    await over
    changes = of(logs, "role_change")
    assert [(c["role"], c["cell"]) for c in changes[:6]] == [
        ("train", 0), ("train", 1), ("train", 2), ("rollout", 2), ("rollout", 1), ("rollout", 0)
    ]  # fmt: skip
    assert changes[0]["waterlevel"] == "w=4 <= C_R-C_e = 12-4"
    assert changes[0]["calls_in_flight"] == 2
    assert list(changes[0]["states_s"]) == ["cancel", "pull"]
    assert [entry["step"] for entry in of(logs, "checkpoint")] == [2]
    assert [entry["version"] for entry in of(logs, "publish")] == [1, 2]
    assert len(of(logs, "finish")) == 1
    status = await world.waterlevel.ask(GetSchedule())
    assert (status.step, status.published, status.dispatched, status.finished) == (2, 2, 20, 20)
    assert (status.role_changes, status.role_changes_with_calls_in_flight) == (12, 6)
    assert status.checkpoint == "checkpoints/step"
    assert [cell.cell for cell in status.cells] == [0, 1, 2]


async def test_counters_move_on_while_a_cell_changes(world: World) -> None:
    notes = await started(world)
    held = notes.hold("enter_train", 0)
    await world.finish(4)
    await world.ready(0, 3)
    await notes.next("enter_train", 0)
    await world.finish(4)
    assert (await world.waterlevel.ask(GetSchedule())).finished == 8
    assert ("enter_train", 1) not in notes.all, "one at a time"
    held.set()
    await notes.next("enter_train", 1)


async def test_cells_in_rollout_are_updated_before_anything_new_is_dispatched(world: World) -> None:
    notes = await started(world)
    held = notes.hold("update", 2)
    await world.ready(0, 1)
    await notes.next("enter_train", 0)
    await world.ready(0, 0, complete=True)
    await world.done(0)
    await notes.next("publish")
    await notes.next("update", 1)
    await world.waterlevel.ask(GetSchedule())
    assert ("enter_rollout", 0) not in notes.all
    held.set()
    await notes.next("enter_rollout", 0)


async def test_a_dead_satellite_is_cut_off_at_once_and_its_next_life_admitted(
    world: World, logs: list[Any]
) -> None:
    notes = await started(world)
    held = notes.hold("enter_train", 0)
    await world.finish(4)
    await world.ready(0, 3)
    await notes.next("enter_train", 0)
    await world.crash(1, "a rank was killed")
    await notes.next("close_route", 1, True)
    await notes.next("cell_gone", 1, 1)
    assert "a rank was killed" in of(logs, "cell_down")[0]["reason"]
    await world.up(1, incarnation=2)
    held.set()
    await notes.next("open_route", 1, 2)


async def test_the_death_of_a_cells_actor_is_noticed(world: World) -> None:
    notes = await started(world)
    await world.node.stop(world.cells[2])
    await notes.next("close_route", 2, True)
    await notes.next("cell_gone", 2, 1)


async def test_a_life_that_begins_before_the_end_of_the_last_is_noticed_ends_it_first(world: World) -> None:
    notes = await started(world)
    held = notes.hold("close_route", 2, True)
    await world.up(2, incarnation=2)
    await notes.next("close_route", 2, True)
    assert ("open_route", 2, 2) not in notes.all
    held.set()
    await notes.next("cell_gone", 2, 1)
    await notes.next("open_route", 2, 2)


async def test_a_cell_that_fails_to_change_is_down(world: World, logs: list[Any]) -> None:
    notes = await started(world)
    notes.failing.add(("enter_train", 1))
    await world.finish(8)
    await world.ready(0, 3)
    await notes.next("enter_train", 1)
    await notes.next("enter_train", 2)
    await world.waterlevel.ask(GetSchedule())
    assert ("cell_gone", 1, 1) in notes.past
    (down,) = of(logs, "cell_down")
    assert down["cell"] == 1 and "was to fail" in down["reason"]
    (lost,) = of(logs, "role_change_lost")
    (ordered,) = [entry for entry in of(logs, "role_change_ordered") if entry["change"] == lost["change"]]
    assert (ordered["cell"], ordered["to"]) == (1, "train")


async def test_a_change_that_is_wanted_no_longer_turns_back(world: World, logs: list[Any]) -> None:
    notes = await started(world)
    await world.finish(4)
    await world.ready(0, 3)
    await notes.next("enter_train", 0)
    held = notes.hold("enter_train", 1)
    await world.finish(1)
    await notes.next("enter_train", 1)
    # w = 3, and nobody is left to carry it.
    await world.crash(2, "a rank was killed")
    await notes.next("turn_back", 1)
    held.set()
    await notes.next("open_route", 1, 1)
    await world.up(2, incarnation=2)
    await notes.next("open_route", 2, 2)
    (back,) = [entry for entry in of(logs, "role_change") if entry["outcome"] == "turned_back"]
    assert (back["cell"], back["role"], back["cause"]) == (1, "rollout", "w=3 > C_R=0")
    states = [e["state"] for e in of(logs, "role_change_state") if e["change"] == back["change"]]
    # What the proxy passes through it says itself.
    assert states == ["open_route"]
    status = await world.waterlevel.ask(GetSchedule())
    assert (status.role_changes, status.role_changes_turned_back, status.calls_moved) == (1, 1, 4)


async def test_a_cell_that_could_not_train_gets_calls_again_and_is_ordered_anew(
    world: World, logs: list[Any]
) -> None:
    notes = await started(world)
    notes.going_back.add(("enter_train", 1))
    await world.finish(8)
    await world.ready(0, 3)
    await notes.next("enter_train", 1)
    await notes.next("open_route", 1, 1)
    await notes.next("enter_train", 1)
    await notes.next("enter_train", 2)
    (failed,) = [entry for entry in of(logs, "role_change") if entry["outcome"] == "failed"]
    assert (failed["cell"], failed["cause"], failed["log_level"]) == (1, "pull: no weights", "warning")
    assert (await world.waterlevel.ask(GetSchedule())).role_changes_failed == 1
    assert not of(logs, "cell_down")


async def test_a_change_is_turned_back_while_its_calls_still_leave(world: World) -> None:
    notes = await started(world)
    await world.finish(5)
    await world.ready(0, 3)
    await notes.next("enter_train", 0)
    await notes.next("enter_train", 1)
    held = notes.hold("enter_rollout", 1)
    await world.crash(2, "a rank was killed")
    await notes.next("enter_rollout", 1)
    held.set()
    await notes.next("open_route", 1, 1)
    await world.up(2, incarnation=2)
    await notes.next("open_route", 2, 2)
    closing = notes.hold("close_route", 1, False)
    await notes.next("close_route", 1, False)
    await world.crash(2, "a rank was killed")
    await notes.next("turn_back", 1)
    closing.set()
    await notes.next("open_route", 1, 1)
    assert ("enter_train", 1) not in notes.all


async def test_a_satellite_is_called_back_within_a_burst_when_calls_wait(
    world: World, logs: list[Any]
) -> None:
    notes = await started(world)
    await world.finish(5)
    await world.ready(0, 3)
    await notes.next("enter_train", 1)
    held = notes.hold("enter_rollout", 1)
    await world.calls(9)
    await notes.next("enter_rollout", 1)
    status = await world.waterlevel.ask(GetSchedule())
    assert (status.calls, status.waiting_calls) == (9, 5)
    held.set()
    await notes.next("open_route", 1, 1)
    await world.calls(5)
    await world.waterlevel.ask(GetSchedule())
    assert ("enter_train", 1) not in notes.all
    await world.calls(4)
    await notes.next("enter_train", 1)
    assert of(logs, "role_change")[-1]["waterlevel"] == "waiting calls=5 > 1*C_R, C_R=4"


async def test_a_life_with_older_weights_is_updated_before_it_gets_calls(world: World) -> None:
    notes = await started(world, first_step=1)
    await world.up(2, incarnation=2, version=0)
    await notes.next("update", 2)
    await notes.next("open_route", 2, 2)


async def test_the_death_of_the_core_ends_the_job_with_advice(world: World) -> None:
    await started(world)
    waiting = asyncio.create_task(world.waterlevel.ask(WaitFinished(), timeout_s=50.0))
    await asyncio.sleep(0)
    await world.crash(0, "a rank was killed")
    with pytest.raises(ActorDied, match=r"the core, died: .*a rank was killed; .*--resume"):
        await waiting


async def test_draining_saves_the_last_step_and_ends(world: World) -> None:
    notes = await started(world)
    await world.finish(8)
    waiting = asyncio.create_task(world.waterlevel.ask(WaitFinished(), timeout_s=50.0))
    await world.waterlevel.ask(Drain())
    await notes.next("save")
    await waiting
    await world.ready(0, 3)
    await world.waterlevel.ask(GetSchedule())
    assert ("enter_train", 0) not in notes.all


async def test_draining_before_any_cell_is_up_saves_nothing(world: World) -> None:
    await world.start(CONFIG)
    await world.waterlevel.ask(Drain())
    assert world.notes.all == []


async def test_draining_a_resumed_job_before_its_first_step_saves_nothing_new(world: World) -> None:
    notes = await started(world, first_step=1)
    await world.waterlevel.ask(Drain())
    assert ("save",) not in notes.all


async def test_a_checkpoint_that_fails_is_an_event_and_no_more(world: World, logs: list[Any]) -> None:
    notes = await started(world, checkpoint_every_steps=1)
    notes.failing.add(("save",))
    await world.finish(8)
    await world.ready(0, 1)
    await notes.next("enter_train", 0)
    await world.ready(0, 0, complete=True)
    await world.done(0)
    await notes.next("save")
    await notes.next("dispatch", "train", 2, 1)
    assert len(of(logs, "checkpoint_failed")) == 1


async def test_a_cell_too_busy_to_answer_is_shown_as_it_was(world: World) -> None:
    notes = await started(world, status_timeout_s=0.5)
    await world.waterlevel.ask(GetSchedule())
    notes.hold("status", 1)
    status = await world.waterlevel.ask(GetSchedule())
    assert [(cell.cell, cell.changing) for cell in status.cells] == [(0, False), (1, True), (2, False)]
