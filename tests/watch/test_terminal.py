from __future__ import annotations

import io

import pytest
from rich.console import Console

from gyre.cell.engine.base import EngineMetrics
from gyre.watch import TerminalView
from gyre.watch.terminal import Eta

from .statuses import cell, event, schedule


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(view: TerminalView, console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None)


def test_the_view_shows_step_rewards_waterlevel_and_cells(console: Console, clock: Clock) -> None:
    view = TerminalView("tidy", 8, console, clock)
    view(event("step", step=1, reward=0.25))
    view(event("eval", step=1, score=0.5))
    busy = EngineMetrics(running=5, waiting=2)
    status = schedule(
        cell(0, role="train", micro_steps=12, version=4),
        cell(1, engine=busy, tokens_per_s=812.4, busy_fraction=0.93),
        cell(2, changing=True),
        dispatched=40,
        finished=31,
        step=1,
        published=1,
        role_changes=3,
    )
    console.print(view.render(status))
    text = shown(view, console)
    for part in ("tidy", "step 1/10", "reward 0.250", "eval 0.500", "w=9 C_R=8", "31/40", "role changes 3"):
        assert part in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "core", "train", "v4", "0+0", "0", "0%", "12"] in rows
    assert ["1", "rollout", "v3", "5+2", "812", "93%", "0"] in rows
    assert ["2", "rollout", "(changing)", "v3", "0+0", "0", "0%", "0"] in rows


def test_what_is_not_known_is_a_dash(console: Console, clock: Clock) -> None:
    view = TerminalView("tidy", 8, console, clock)
    console.print(view.render(schedule()))
    text = shown(view, console)
    assert "reward -" in text
    assert "ETA -" in text


def test_the_live_view_refreshes_and_leaves_its_last_state(console: Console, clock: Clock) -> None:
    with TerminalView("tidy", 8, console, clock) as view:
        view.update(schedule(step=1))
        clock.now += 60
        view.update(schedule(step=2))
        assert "step 2/10" in shown(view, console)
        assert "ETA 8:00" in shown(view, console)
    view.close()


def test_eta_follows_the_pace_of_the_last_steps(clock: Clock) -> None:
    eta = Eta(clock, window_steps=2)
    eta.update(0)
    assert eta.seconds(10) is None
    for step, seconds in ((1, 100.0), (2, 10.0), (3, 10.0)):
        clock.now += seconds
        eta.update(step)
    assert eta.seconds(10) == pytest.approx(70)
    clock.now += 4
    eta.update(3)
    assert eta.seconds(10) == pytest.approx(66)
    assert eta.seconds(3) == 0
