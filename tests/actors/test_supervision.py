from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.actors.specs import Restart, Strategy
from gyre.actors.supervision import Decision, Escalate, Forget, RestartChildren, Restarts, Supervision

ORDER = ["a", "b", "c"]


def decide(restarts: Restarts, now: float = 0.0, restart: Restart = "permanent", **how: bool) -> Decision:
    options = {"abnormal": True, "watched": False, **how}
    return restarts.decide("b", restart, order=ORDER, now=now, **options)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [("one_for_one", ("b",)), ("rest_for_one", ("b", "c")), ("one_for_all", ("a", "b", "c"))],
)
def test_the_strategy_says_who_is_restarted(strategy: Strategy, names: tuple[str, ...]) -> None:
    decision = decide(Restarts(Supervision(strategy)))
    assert isinstance(decision, RestartChildren)
    assert decision.names == names


def test_more_restarts_than_allowed_in_the_window_escalate() -> None:
    restarts = Restarts(Supervision(max_restarts=2, window_s=10))
    assert isinstance(decide(restarts, 0), RestartChildren)
    assert isinstance(decide(restarts, 9), RestartChildren)
    assert decide(restarts, 9.5) == Escalate("2 restarts in 10 s were not enough")


def test_restarts_leave_the_window() -> None:
    restarts = Restarts(Supervision(max_restarts=1, window_s=10))
    assert isinstance(decide(restarts, 0), RestartChildren)
    assert isinstance(decide(restarts, 10.5), RestartChildren)
    assert isinstance(decide(restarts, 11), Escalate)


def test_each_restart_in_the_window_waits_longer_up_to_a_bound() -> None:
    restarts = Restarts(Supervision(max_restarts=20))
    delays = [d.delay_s for d in (decide(restarts) for _ in range(20)) if isinstance(d, RestartChildren)]
    assert delays == sorted(delays)
    assert delays[0] <= 0.05
    assert delays[-1] == 1.0


def test_transient_is_restarted_only_after_an_abnormal_end() -> None:
    assert isinstance(decide(Restarts(Supervision()), restart="transient"), RestartChildren)
    assert decide(Restarts(Supervision()), restart="transient", abnormal=False) == Forget()


def test_permanent_is_restarted_however_it_ends() -> None:
    assert isinstance(decide(Restarts(Supervision()), abnormal=False), RestartChildren)


def test_a_temporary_crash_must_be_known_to_someone() -> None:
    restarts = Restarts(Supervision())
    assert decide(restarts, restart="temporary", watched=True) == Forget()
    assert decide(restarts, restart="temporary", abnormal=False) == Forget()
    assert isinstance(decide(restarts, restart="temporary"), Escalate)


def test_no_restarts_allowed_means_the_first_crash_escalates() -> None:
    assert isinstance(decide(Restarts(Supervision(max_restarts=0))), Escalate)


@given(st.lists(st.floats(0.001, 30.0), min_size=1, max_size=60), st.integers(0, 5), st.floats(0.5, 50.0))
def test_the_window_slides(gaps: list[float], allowed: int, window_s: float) -> None:
    """A crash escalates exactly where so many restarts lie within the window before it."""
    restarts = Restarts(Supervision(max_restarts=allowed, window_s=window_s))
    now, times = 0.0, []
    for gap in gaps:
        now += gap
        within = [time for time in times if now - time <= window_s]
        decision = decide(restarts, now)
        assert isinstance(decision, Escalate) == (len(within) >= allowed)
        if isinstance(decision, RestartChildren):
            assert decision.delay_s == min(0.01 * 2 ** len(within), 1.0)
            times.append(now)
