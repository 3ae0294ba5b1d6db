from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.schedule.policy import PolicyConfig, decide, eval_due, turns_back
from gyre.schedule.state import (
    CellState,
    ClusterState,
    DispatchEval,
    DispatchGroups,
    Finish,
    Order,
    PublishWeights,
    ToRollout,
    ToTrain,
)
from tests.schedule.simulated import SimulatedCluster

CONFIG = PolicyConfig(groups_per_step=2, group_size=4, eval_every=5)


def cluster(phases: str, **changes: Any) -> ClusterState:
    """Cells of capacity 12, one letter each: rollout, train, changing, down. Two groups of a step run."""
    names = {"r": "rollout", "t": "train", "c": "changing", "d": "down"}
    cells = tuple(CellState(cell=n, phase=names[p], capacity=12, version=0) for n, p in enumerate(phases))
    state = ClusterState(
        cells=cells,
        dispatched=8,
        started=8,
        finished=0,
        step=0,
        steps=10,
        published=0,
        groups_dispatched=2,
        groups_finished=0,
        ready_micro_steps=0,
        eval_pending=False,
        eval_running=0,
    )
    return msgspec.structs.replace(state, **changes)


def orders(phases: str, config: PolicyConfig = CONFIG, **changes: Any) -> list[Order]:
    return decide(cluster(phases, **changes), config)


def replaced(**changes: Any) -> PolicyConfig:
    return msgspec.structs.replace(CONFIG, **changes)


def changes_of(phases: str, **changes: Any) -> str:
    """The one role change that is ordered, as `t0` or `r2`; empty if none."""
    made = orders(phases, **changes)
    return "".join(f"{'t' if isinstance(o, ToTrain) else 'r'}{o.cell}" for o in made if hasattr(o, "cell"))


def test_the_core_leaves_when_the_rest_can_carry_the_work() -> None:
    assert orders("rrr", dispatched=32, finished=11, ready_micro_steps=1) == [
        ToTrain(cell=0, waterlevel="w=21 <= C_R-C_e = 36-12")
    ]


@pytest.mark.parametrize(
    ("phases", "finished", "ready", "expected"),
    [
        ("rrr", 7, 1, ""),  # w=25 > 24
        ("rrr", 8, 1, "t0"),
        ("rrr", 32, 0, ""),  # nothing to train
        ("crr", 32, 1, ""),  # one at a time
        ("tcr", 32, 1, ""),
        ("trr", 19, 1, ""),  # w=13 > 12
        ("trr", 20, 1, "t1"),
        ("trr", 20, 0, ""),
        ("ttr", 31, 1, ""),  # w=1, nobody else rolls out
        ("ttr", 32, 1, "t2"),
        ("tdr", 32, 1, "t2"),
        ("drr", 32, 1, ""),  # the core leads
        ("ddd", 32, 1, ""),
    ],
)
def test_cells_leave_in_order_as_the_waterlevel_falls(
    phases: str, finished: int, ready: int, expected: str
) -> None:
    assert changes_of(phases, dispatched=32, finished=finished, ready_micro_steps=ready) == expected


def test_a_step_without_micro_steps_still_gets_the_core() -> None:
    assert changes_of("rrr", step_complete=True) == "t0"
    assert changes_of("trr", step_complete=True) == ""


def test_standalone_engines_count_as_capacity_that_stays() -> None:
    assert changes_of("r", ready_micro_steps=1) == ""
    assert changes_of("r", ready_micro_steps=1, standalone_capacity=8) == "t0"


def test_a_complete_burst_is_published_before_anything_else() -> None:
    assert orders("ttt", step=1, finished=8) == [PublishWeights()]


def test_a_burst_of_several_steps_is_published_at_its_end() -> None:
    config = replaced(burst_steps=2)
    assert orders("ttt", config, groups_dispatched=4, step=1, finished=8) == []
    assert orders("ttt", config, groups_dispatched=4, step=2, finished=8) == [PublishWeights()]


def test_the_last_burst_may_be_shorter() -> None:
    config = replaced(burst_steps=4)
    assert orders("ttt", config, groups_dispatched=20, step=10, published=8) == [PublishWeights()]


def test_publishing_waits_for_an_evaluation() -> None:
    assert orders("trr", step=1, eval_running=1) == []


def test_training_cells_return_to_carry_an_evaluation_that_delays_publishing() -> None:
    assert changes_of("ttt", step=1, eval_running=1, finished=4) == "r2"
    assert changes_of("tdd", step=1, eval_running=1, finished=4) == "r0"


def test_after_publishing_cells_return_last_first_and_then_all_is_dispatched() -> None:
    published = {"step": 5, "published": 5, "groups_dispatched": 10, "finished": 8, "eval_pending": True}
    assert changes_of("ttt", **published) == "r2"
    assert changes_of("ttr", **published) == "r1"
    assert changes_of("trr", **published) == "r0"
    assert orders("rrr", **published) == [DispatchEval(), DispatchGroups(groups=2)]


def test_the_core_stays_if_the_next_batch_is_ready_and_the_rest_can_carry_what_comes() -> None:
    config = replaced(lead_steps=1)
    boundary = {"step": 1, "published": 1, "groups_dispatched": 4, "finished": 8, "ready_micro_steps": 3}
    assert orders("trr", config, **boundary) == [DispatchGroups(groups=2)]
    assert orders("trd", config, **boundary) == [DispatchGroups(groups=2)]
    assert orders("tdd", config, **boundary) == [ToRollout(cell=0, waterlevel="burst over: w+Q=0+8, C_R=0")]
    assert orders("trd", config, **boundary | {"dispatched": 13}) == [
        ToRollout(cell=0, waterlevel="burst over: w+Q=5+8, C_R=12")
    ]
    assert orders("trr", config, **boundary | {"ready_micro_steps": 0}) == [
        ToRollout(cell=0, waterlevel="burst over: w+Q=0+8, C_R=24")
    ]


def test_an_evaluation_that_comes_counts_for_what_the_rest_must_carry() -> None:
    config = replaced(lead_steps=1)
    boundary = {"step": 1, "published": 1, "groups_dispatched": 4, "finished": 8, "ready_micro_steps": 3}
    pending = boundary | {"eval_pending": True}
    assert orders("trd", config, **pending, eval_executions=4) == [DispatchEval(), DispatchGroups(groups=2)]
    assert orders("trd", config, **pending, eval_executions=5) == [
        ToRollout(cell=0, waterlevel="burst over: w+Q=0+13, C_R=12")
    ]


def test_the_core_returns_if_nobody_else_rolls_out_though_it_is_not_known_what_comes() -> None:
    waiting = {"step": 5, "published": 5, "groups_dispatched": 20, "finished": 8, "eval_pending": True}
    assert changes_of("tdd", **waiting, ready_micro_steps=1) == "r0"


def test_dispatch_depth_is_phi_plus_mu_steps_and_ends_with_the_job() -> None:
    config = replaced(burst_steps=2, lead_steps=1)
    assert orders("rrr", config, groups_dispatched=0) == [DispatchGroups(groups=6)]
    assert orders("rrr", config, groups_dispatched=6, step=1) == []
    assert orders("rrr", config, groups_dispatched=6, step=2, published=2) == [DispatchGroups(groups=4)]
    assert orders("rrr", config, groups_dispatched=18, step=8, published=8) == [DispatchGroups(groups=2)]
    assert orders("rrr", config, groups_dispatched=20, step=8, published=8) == []


def test_dispatch_is_not_lost_when_the_core_commits_while_it_publishes() -> None:
    config = replaced(burst_steps=2, lead_steps=1)
    assert orders("rrr", config, groups_dispatched=10, step=5, published=4) == [DispatchGroups(groups=4)]


def test_nothing_is_dispatched_before_a_cell_rolls_out() -> None:
    assert orders("ddd", groups_dispatched=0, dispatched=0, eval_pending=True) == []
    assert orders("rdd", groups_dispatched=0, dispatched=0, eval_pending=True) == [
        DispatchEval(),
        DispatchGroups(groups=2),
    ]


def test_the_first_evaluation_runs_beside_the_first_burst() -> None:
    assert orders("rrr", groups_dispatched=0, eval_pending=True) == [DispatchEval(), DispatchGroups(groups=2)]


@pytest.mark.parametrize(
    ("phases", "finished", "ready", "expected"),
    [
        ("ttd", 7, 0, "r1"),  # w=1 > C_R=0
        ("ttd", 8, 0, ""),  # nothing is left to carry
        ("ttr", 0, 0, ""),  # w=8 <= 12
        ("tdd", 7, 0, "r0"),  # nobody else can
        ("tdd", 7, 1, ""),  # the core trains what there is first
    ],
)
def test_a_training_cell_returns_when_capacity_was_lost(
    phases: str, finished: int, ready: int, expected: str
) -> None:
    assert changes_of(phases, finished=finished, ready_micro_steps=ready) == expected


@pytest.mark.parametrize(
    ("phases", "calls", "expected"),
    [
        ("ttr", 24, ""),  # 12 wait, C_R = 12
        ("ttr", 25, "r1"),
        ("tcr", 25, ""),  # one at a time
        ("trr", 49, ""),  # the core trains on
        ("trr", 13, ""),  # a satellite that left now would let 1 call wait
        ("trr", 12, "t1"),
        ("rrr", 36, "t0"),  # the core leaves by the waterlevel alone
    ],
)
def test_a_satellite_is_called_back_when_calls_wait(phases: str, calls: int, expected: str) -> None:
    assert changes_of(phases, calls=calls, ready_micro_steps=1) == expected
    as_published = orders(phases, replaced(call_back=0.0), calls=calls, ready_micro_steps=1)
    assert as_published == orders(phases, calls=0, ready_micro_steps=1)


def test_a_call_back_says_why() -> None:
    assert orders("ttr", calls=25) == [ToRollout(cell=1, waterlevel="waiting calls=13 > 1*C_R, C_R=12")]


def turned(phases: str, to: Any, **changes: Any) -> str:
    """What the changing cell is ordered instead, as `t0` or `r2`; empty if it is to go on."""
    state = cluster(phases, **changes)
    cells = tuple(msgspec.structs.replace(c, to=to) if c.phase == "changing" else c for c in state.cells)
    order = turns_back(msgspec.structs.replace(state, cells=cells), CONFIG)
    return "" if order is None else f"{'t' if isinstance(order, ToTrain) else 'r'}{order.cell}"


@pytest.mark.parametrize(
    ("phases", "to", "changes", "expected"),
    [
        ("tcr", "train", {}, ""),
        ("tcr", "train", {"dispatched": 13}, "r1"),  # C_R fell below w
        ("tcr", "train", {"calls": 25}, "r1"),
        ("crr", "train", {"dispatched": 99, "ready_micro_steps": 1}, ""),  # the core has work
        ("tcr", "rollout", {"ready_micro_steps": 1}, "t1"),  # it would leave again at once
        ("tcr", "rollout", {}, ""),
        ("tcr", "rollout", {"ready_micro_steps": 1, "calls": 13}, ""),
        ("tcr", "train", {"dispatched": 13, "draining": True}, ""),
        ("trr", None, {"dispatched": 99}, ""),
    ],
)
def test_a_change_turns_back_when_its_cell_would_be_ordered_back_at_once(
    phases: str, to: Any, changes: dict[str, Any], expected: str
) -> None:
    assert turned(phases, to, **changes) == expected


STATES = st.builds(
    cluster,
    st.text("rtd", min_size=2, max_size=5),
    dispatched=st.integers(0, 60),
    calls=st.integers(0, 150),
    ready_micro_steps=st.integers(0, 2),
    step_complete=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(state=STATES, capacities=st.lists(st.integers(1, 20), min_size=5, max_size=5), data=st.data())
def test_where_nothing_else_happens_no_cell_changes_twice(
    state: ClusterState, capacities: list[int], data: st.DataObject
) -> None:
    """Calls, executions and work stay what they are: then the policy comes to rest, and turns none back."""
    config = replaced(call_back=data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])))
    state = msgspec.structs.replace(state, cells=tuple(
        msgspec.structs.replace(c, capacity=capacity)
        for c, capacity in zip(state.cells, capacities, strict=False)
    ))  # fmt: skip
    changed: set[int] = set()
    while made := decide(state, config):
        (order,) = made
        assert isinstance(order, ToTrain | ToRollout)
        assert order.cell not in changed, state
        changed.add(order.cell)
        to = "train" if isinstance(order, ToTrain) else "rollout"
        changing = with_cell(state, order.cell, phase="changing", to=to)
        assert decide(changing, config) == []
        assert turns_back(changing, config) is None
        state = with_cell(state, order.cell, phase=to)


def with_cell(state: ClusterState, cell: int, **changes: Any) -> ClusterState:
    cells = tuple(msgspec.structs.replace(c, **changes) if c.cell == cell else c for c in state.cells)
    return msgspec.structs.replace(state, cells=cells)


@settings(max_examples=100, deadline=None)
@given(
    calls=st.lists(st.integers(0, 60), min_size=30, max_size=60),
    factor=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    capacity=st.integers(1, 6),
)
def test_a_call_back_and_a_departure_are_apart_by_calls(
    calls: list[int], factor: float, capacity: int
) -> None:
    """Over any trace a satellite that has left comes back only when the calls have grown by more than
    `call_back` * C_R since, and leaves again only when they have fallen as far."""
    config = replaced(call_back=factor)
    state = cluster("trrr", dispatched=0, ready_micro_steps=1)
    state = msgspec.structs.replace(
        state, cells=tuple(msgspec.structs.replace(c, capacity=capacity) for c in state.cells)
    )
    left: dict[int, int] = {}
    called_back: dict[int, int] = {}
    for now in calls:
        state = msgspec.structs.replace(state, calls=now)
        while made := decide(state, config):
            (order,) = made
            match order:
                case ToTrain(cell=cell):
                    capacity_then = state.rollout_capacity - capacity
                    assert now <= capacity_then
                    assert cell not in called_back or now < called_back[cell] - factor * capacity_then
                    left[cell] = now
                    state = with_cell(state, cell, phase="train")
                case ToRollout(cell=cell):
                    if state.rollout_capacity == 0:
                        break
                    assert now - left[cell] > factor * state.rollout_capacity
                    called_back[cell] = now
                    state = with_cell(state, cell, phase="rollout")


def test_draining_orders_nothing() -> None:
    assert orders("rrr", groups_dispatched=0, draining=True) == []
    assert orders("rrr", ready_micro_steps=3, finished=8, draining=True) == []


def test_the_job_ends_after_the_last_evaluation() -> None:
    over = {"step": 10, "groups_dispatched": 20, "finished": 8}
    assert orders("ttt", **over, published=9) == [PublishWeights()]
    assert changes_of("ttt", **over, published=10, eval_pending=True) == "r2"
    assert orders("rrr", **over, published=10, eval_running=1) == []
    assert orders("ttt", **over, published=10) == [Finish()]


@pytest.mark.parametrize(
    ("published", "evaluated", "expected"),
    [
        (0, None, True),
        (0, 0, False),
        (4, 0, False),
        (5, 0, True),
        (6, 5, False),
        (11, 5, True),
        (12, 11, True),
    ],
)
def test_evaluations_are_due_first_last_and_every_so_often(
    published: int, evaluated: int | None, expected: bool
) -> None:
    assert eval_due(CONFIG, published=published, steps=12, evaluated=evaluated) is expected
    assert not eval_due(replaced(eval_every=0), published=published, steps=12, evaluated=evaluated)


def check_order(state: ClusterState, order: Order) -> None:
    assert sum(c.phase == "changing" for c in state.cells) == 0
    phases = {c.cell: c.phase for c in state.cells}
    capacity = {c.cell: c.capacity for c in state.cells}
    match order:
        case ToTrain(cell=cell):
            assert phases[cell] == "rollout"
            assert all(phases[n] in ("train", "down") for n in range(cell)), "not a prefix"
            assert phases[0] == "train" or cell == 0
            assert state.unfinished <= state.rollout_capacity - capacity[cell]
            capacities = f"{state.rollout_capacity}-{capacity[cell]}"
            assert order.waterlevel == f"w={state.unfinished} <= C_R-C_e = {capacities}"
        case ToRollout(cell=cell):
            assert cell == max(n for n, phase in phases.items() if phase == "train")
        case PublishWeights():
            assert state.eval_running == 0 and state.step > state.published
        case DispatchGroups() | DispatchEval():
            assert state.rollout_capacity > 0


@settings(max_examples=200, deadline=None)
@given(
    capacities=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    burst=st.integers(1, 3),
    lead=st.integers(0, 2),
    steps=st.integers(1, 5),
    eval_every=st.integers(0, 3),
    deaths=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)
def test_any_course_of_events_ends_and_keeps_order_and_waterlevel(
    capacities: list[int], burst: int, lead: int, steps: int, eval_every: int, deaths: int, seed: int
) -> None:
    config = PolicyConfig(
        burst_steps=burst,
        lead_steps=lead,
        groups_per_step=2,
        group_size=3,
        eval_every=eval_every,
    )
    simulated = SimulatedCluster(
        config=config, capacities=capacities, steps=steps, seed=seed, deaths=deaths, check=check_order
    )
    simulated.run(max_events=5000)
    state = simulated.state()
    assert simulated.is_finished
    assert state.step == state.published == steps
    assert state.unfinished == 0
    assert state.groups_dispatched == steps * config.groups_per_step
