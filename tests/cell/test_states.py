from __future__ import annotations

import pytest

from gyre.cell.states import StateTimes


def test_states_in_their_order_entered_again_or_failed() -> None:
    times = StateTimes()
    with times.measure("cancel"):
        pass
    with pytest.raises(RuntimeError), times.measure("migrate"):
        raise RuntimeError
    before = times.by_state_s["cancel"]
    with times.measure("cancel"):
        sum(range(10_000))
    assert list(times.by_state_s) == ["cancel", "migrate"]
    assert times.by_state_s["cancel"] > before
