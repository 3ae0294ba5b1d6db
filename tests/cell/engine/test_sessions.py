from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre.cell.engine.sessions import LastCalls


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 9), max_size=8)), max_size=20))
def test_the_latest_sessions_that_fit_are_known(calls: list[tuple[str, list[int]]]) -> None:
    known = LastCalls(limit_tokens=12)
    last: dict[str, list[int]] = {}
    for session, tokens in calls:
        known.note(session, tokens)
        last.pop(session, None)
        last[session] = tokens
        while sum(map(len, last.values())) > 12:
            del last[next(iter(last))]
        assert {name: list(known.tokens(name)) for name in "abcd"} == {n: last.get(n, []) for n in "abcd"}


def test_one_can_be_dropped() -> None:
    known = LastCalls(limit_tokens=4)
    known.note("a", [1, 2, 3])
    known.drop("a")
    known.drop("a")
    assert not known.tokens("a")
    known.note("b", [1, 2])
    known.note("c", [1, 2])
    assert [*known.sessions()] == ["b", "c"]


def test_all_can_be_forgotten() -> None:
    known = LastCalls(limit_tokens=4)
    known.note("a", [1, 2, 3])
    known.forget()
    assert not known.tokens("a")
    known.note("b", [1, 2, 3, 4])
    assert list(known.tokens("b")) == [1, 2, 3, 4]
