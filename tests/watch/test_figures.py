from __future__ import annotations

from gyre.watch.figures import StepRewards, figures

from .statuses import event


def test_the_numbers_of_a_step_are_its_figures() -> None:
    found = figures(event("step", step=3, reward=0.5, micro_steps=4, clean=True, cells=(0, 1), note="x"))
    assert found is not None
    assert found.step == 3
    assert found.values == {"train/reward": 0.5, "train/micro_steps": 4.0}


def test_an_evaluation_has_a_group_of_its_own() -> None:
    found = figures(event("eval", step=3, score=0.5))
    assert found is not None
    assert found.values == {"eval/score": 0.5}


def test_other_events_have_none() -> None:
    assert figures(event("role_change", step=3, seconds=0.1)) is None
    assert figures(event("step", reward=0.5)) is None


def test_a_step_has_the_mean_reward_of_its_executions() -> None:
    rewards = StepRewards()

    def reward(name: str, **fields: object) -> object:
        return rewards(None, "info", event(name, **fields)).get("reward")

    assert reward("group", step=0, scores={"g1.0": 0.0, "g1.1": 1.0}) is None
    assert reward("group", step=1, scores={"g2.0": 0.25}) is None
    assert reward("group", step=0, scores={"g3.0": 0.5}) is None
    assert reward("step", step=0) == 0.5
    assert reward("step", step=1) == 0.25
    assert reward("step", step=2) is None


def test_a_step_tells_what_of_its_groups_was_not_trained() -> None:
    rewards = StepRewards()
    for signal, excluded in ((False, {"not_drawn": 5, "stale": 1}), (True, {"zero_advantage": 4})):
        group = event("group", step=0, scores={"x": 1.0}, without_signal=signal, excluded_tokens=excluded)
        rewards(None, "info", group | {"tool_calls": 3, "malformed_tool_calls": 1})
    step = rewards(None, "info", event("step", step=0))
    assert (step["groups_without_signal"], step["excluded_tokens"]) == (1, 10)
    assert (step["tool_calls"], step["malformed_tool_calls"]) == (6, 2)
