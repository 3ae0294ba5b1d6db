from __future__ import annotations

import pytest

from gyre.cell.states import StateTimes


def test_states_in_their_order_entered_again_or_failed() -> None:
    told: list[tuple[str, str | None]] = []
    times = StateTimes(lambda state, took_s, cause: told.append((state, cause)))
    with times.measure("cancel"):
        pass
    with pytest.raises(RuntimeError), times.measure("migrate"):
        raise RuntimeError("no route")
    before = times.by_state_s["cancel"]
    with times.measure("cancel"):
        sum(range(10_000))
    assert list(times.by_state_s) == ["cancel", "migrate"]
    assert told == [("cancel", None), ("migrate", "no route"), ("cancel", None)]
    assert times.by_state_s["cancel"] > before
