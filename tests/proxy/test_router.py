from __future__ import annotations

from typing import Any

from gyre.proxy.router import EngineKey, Router


def routed(router: Router[str], session: str, call: str, **options: Any) -> str:
    seat = router.pick(session, **options)
    assert seat is not None
    router.begin(call, seat.key)
    return seat.ref


def three_cells() -> Router[str]:
    router: Router[str] = Router()
    for cell in range(3):
        router.open(cell, 1, [f"cell{cell}"], capacity_calls=2)
    return router


def test_no_open_cell_takes_no_call() -> None:
    router: Router[str] = Router()
    assert router.pick("s") is None
    assert not router.any_open


def test_new_sessions_go_where_the_load_is_least() -> None:
    router = three_cells()
    assert {routed(router, f"s{n}", f"c{n}") for n in range(3)} == {"cell0", "cell1", "cell2"}
    router.end("c1")
    assert routed(router, "s3", "c3") == "cell1"


def test_load_is_relative_to_capacity() -> None:
    router: Router[str] = Router()
    router.open(0, 1, ["large"], capacity_calls=8)
    router.open(1, 1, ["small"], capacity_calls=2)
    routed(router, "a", "c0")
    routed(router, "b", "c1")
    assert [routed(router, f"s{n}", f"d{n}") for n in range(3)] == ["large"] * 3


def test_a_session_stays_at_its_engine() -> None:
    router = three_cells()
    engine = routed(router, "s", "c0")
    assert [routed(router, "s", f"d{n}") for n in range(4)] == [engine] * 4


def test_a_forgotten_session_is_free() -> None:
    router = three_cells()
    engine = routed(router, "s", "c0")
    router.forget_session("s")
    assert routed(router, "s", "c1") != engine


def test_a_closed_cell_admits_none_and_names_its_calls() -> None:
    router = three_cells()
    calls = {routed(router, f"s{n}", f"c{n}"): f"c{n}" for n in range(3)}
    assert router.close(1) == (calls["cell1"],)
    assert all(routed(router, f"t{n}", f"d{n}") != "cell1" for n in range(6))
    router.end(calls["cell1"])
    assert router.calls_at(1) == ()


def test_a_moved_call_goes_to_the_cell_that_stays_longest() -> None:
    router = three_cells()
    routed(router, "busy", "c0")  # at cell 2, the latest in the order
    router.close(0)
    assert routed(router, "moved", "c1", moved=True) == "cell2"


def test_a_moved_call_avoids_a_full_cell() -> None:
    router = three_cells()
    for n in range(2):
        router.begin(f"c{n}", EngineKey(2, 1, 0))
    assert routed(router, "moved", "c9", moved=True) == "cell1"


def test_a_session_moves_back_to_nowhere_it_left() -> None:
    router = three_cells()
    left = routed(router, "s", "c0")
    router.close(int(left[-1]))
    new = routed(router, "s", "c1")
    router.open(int(left[-1]), 1, [left], capacity_calls=2)
    assert routed(router, "s", "c2") == new


def test_a_failed_engine_is_excluded_from_the_next_try() -> None:
    router = three_cells()
    seat = router.pick("s")
    assert seat is not None
    again = router.pick("s", exclude={seat.key})
    assert again is not None and again.key != seat.key
    assert router.pick("s", exclude={EngineKey(cell, 1, 0) for cell in range(3)}) is None


def test_a_dead_engine_comes_back_with_its_cells_next_life() -> None:
    router: Router[str] = Router()
    router.open(0, 1, ["first life"], capacity_calls=2)
    seat = router.pick("s")
    assert seat is not None
    router.begin("c0", seat.key)
    router.fail(seat.key)
    assert router.pick("s") is None
    router.open(0, 2, ["second life"], capacity_calls=2)
    assert routed(router, "s", "c1") == "second life"
    assert set(router.calls_at(0)) == {"c0", "c1"}
    router.end("c0")
    assert router.calls_at(0) == ("c1",)


def test_a_cells_engines_share_its_capacity() -> None:
    router: Router[str] = Router()
    router.open(0, 1, ["a", "b"], capacity_calls=4)
    assert {routed(router, f"s{n}", f"c{n}") for n in range(2)} == {"a", "b"}


def test_ending_an_unknown_call_is_nothing() -> None:
    three_cells().end("unknown")


def test_a_session_that_is_placed_without_a_call_is_as_old_as_before() -> None:
    router = three_cells()
    for session in ("a", "b", "c"):
        router.pick(session)
    router.close(2)
    assert [session for session, _ in router.sessions_at(2)] == []
    for session in ("c", "b", "a"):
        seat = router.place(session)
        assert seat is not None and seat.key.cell == 1
    assert [session for session, _ in router.sessions_at(1)] == ["c", "b", "a"]
    router.put("b", EngineKey(0, 1, 0))
    assert router.seat_of("b") == EngineKey(0, 1, 0)
    router.put("nobody", EngineKey(0, 1, 0))
    assert router.seat_of("nobody") is None
