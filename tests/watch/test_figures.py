from __future__ import annotations

from gyre.watch.figures import figures

from .statuses import event


def test_the_numbers_of_a_step_are_its_figures() -> None:
    found = figures(event("step", step=3, reward=0.5, micro_steps=4, clean=True, cells=(0, 1), note="x"))
    assert found is not None
    assert found.step == 3
    assert found.values == {"train/reward": 0.5, "train/micro_steps": 4.0}


def test_an_evaluation_has_a_group_of_its_own() -> None:
    found = figures(event("eval", step=3, reward=0.5))
    assert found is not None
    assert found.values == {"eval/reward": 0.5}


def test_other_events_have_none() -> None:
    assert figures(event("role_change", step=3, seconds=0.1)) is None
    assert figures(event("step", reward=0.5)) is None
