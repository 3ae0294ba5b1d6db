import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.harness.outcomes import Outcomes, functions_in

SECRET = "s3cret"
CANARIES = ("test_first", "test_last")
SOWN = "test_sown"
EXPECTED = ("test_a.py::test_x", "test_a.py::test_y")

Words = tuple[Any, ...]


def canary(name: str, outcome: str = "failed") -> list[Words]:
    test = f"../orders/test_z.py::{name}"
    return [("test", test, test), ("phase", test, "call", outcome, False), ("tested", test)]


def case(test: str, *phases: tuple[str, str, bool], ends: bool = True) -> list[Words]:
    said: list[Words] = [("test", test, test.partition("[")[0])]
    said += [("phase", test, *phase) for phase in phases]
    return [*said, ("tested", test)] if ends else said


def passes(test: str) -> list[Words]:
    return case(test, ("setup", "passed", False), ("call", "passed", False), ("teardown", "passed", False))


def after(*runs: list[Words], secret: str = SECRET) -> Outcomes:
    outcomes = Outcomes(EXPECTED, *CANARIES, sown=[SOWN])
    for said in runs:
        outcomes.read("".join(f"{secret} {json.dumps(words)}\n" for words in said), SECRET)
    return outcomes


def run(*cases: list[Words]) -> list[Words]:
    return [
        ("ready",),
        *canary("test_first"),
        *(words for said in cases for words in said),
        *canary("test_last"),
    ]


X, Y = EXPECTED


@pytest.mark.parametrize(
    ("cases", "score"),
    [
        ([passes(X), passes(Y)], 1.0),
        ([passes(X)], 0.5),
        ([], 0.0),
        ([passes(X), case(Y, ("setup", "passed", False), ("call", "failed", False))], 0.5),
        ([passes(X), case(Y, ("setup", "failed", False))], 0.5),
        ([passes(X), case(Y, ("call", "passed", False), ("teardown", "failed", False))], 0.5),
        ([passes(X), case(Y, ("call", "passed", False), ends=False)], 0.5),
        ([passes(X), case(Y, ("setup", "skipped", True))], 1.0),
        ([passes(X), case(Y, ("call", "skipped", True))], 1.0),
        ([passes(X), case(Y, ("call", "skipped", False))], 0.5),
        ([passes(f"{X}[1]"), case(f"{X}[2]", ("call", "failed", False)), passes(Y)], 0.75),
        ([passes(X), passes(Y), case("test_a.py::test_made", ("call", "failed", False))], 2 / 3),
        ([passes(X), [("phase", X, "call", "failed", False)], passes(Y)], 0.5),
    ],
)
def test_what_passed_of_what_there_is(cases: list[list[Words]], score: float) -> None:
    outcomes = after(run(*cases))
    assert outcomes.is_over
    assert outcomes.score() == pytest.approx(score)


@pytest.mark.parametrize("outcome", ["passed", "skipped"])
@pytest.mark.parametrize("name", CANARIES)
def test_nothing_is_believed_where_a_test_that_must_fail_did_not(name: str, outcome: str) -> None:
    said = [
        *canary("test_first", outcome if name == "test_first" else "failed"),
        *passes(X),
        *canary("test_last", outcome if name == "test_last" else "failed"),
    ]
    assert after(said).score() == 0.0


def test_nothing_is_believed_where_the_first_test_was_left_out() -> None:
    assert after([*passes(X), *passes(Y), *canary("test_last")]).score() == 0.0


@pytest.mark.parametrize(
    ("phases", "score"),
    [
        ([("call", "failed", False)], 1.0),
        ([("setup", "failed", False)], 1.0),
        ([("setup", "skipped", False)], 1.0),
        ([("call", "passed", False)], 0.0),
        ([("call", "skipped", False)], 0.0),
        ([("setup", "skipped", True)], 0.0),
        ([], 0.0),
    ],
)
def test_those_between_must_fail_too(phases: list[tuple[str, str, bool]], score: float) -> None:
    said = run(passes(X), case(f"test_a.py::{SOWN}", *phases), passes(Y))
    assert after(said).score() == score


def test_a_process_that_was_ended_has_more_to_do() -> None:
    outcomes = after(run()[:4] + case(X, ends=False))
    assert (outcomes.is_over, outcomes.begun) == (False, [X])
    outcomes = after(run()[:4] + case(X, ends=False), run(passes(Y)))
    assert (outcomes.is_over, outcomes.score()) == (True, 0.5)


def test_a_file_that_ended_the_process_is_told() -> None:
    said: list[Words] = [("file", "test_a.py"), ("collected", "test_a.py", "passed"), ("file", "test_b.py")]
    assert after(said).lost == ["test_b.py"]


def test_lines_without_the_secret_are_nobodys() -> None:
    assert not after(run(passes(X)), secret="other").begun


SOURCE = b"""
import pytest, unittest
def test_a(): ...
async def test_b(): ...
def helper(): ...
@pytest.fixture
def test_data(): ...
@pytest.mark.parametrize("n", [1])
def test_c(n): ...
class TestIt:
    def test_d(self): ...
    def helper(self): ...
    class TestInner:
        def test_e(self): ...
class Old(unittest.TestCase):
    def test_f(self): ...
class Other:
    def test_g(self): ...
"""


def test_functions_are_found_without_an_import() -> None:
    names = ["test_a", "test_b", "test_c", "TestIt::test_d", "TestIt::TestInner::test_e", "Old::test_f"]
    assert list(functions_in("t.py", SOURCE)) == [f"t.py::{name}" for name in names]


_WORD = (
    st.sampled_from([*CANARIES, SOWN, X, Y, "call", "passed", "failed", "skipped"])
    | st.booleans()
    | st.integers()
)
_KIND = st.sampled_from(["ready", "file", "collected", "test", "phase", "tested"])
_SAID = st.lists(
    st.tuples(_KIND, st.lists(_WORD, max_size=4)).map(lambda said: [said[0], *said[1]]), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    _SAID | st.lists(st.recursive(st.none() | st.text(max_size=4), st.lists, max_leaves=3), max_size=4),
    st.text(max_size=20),
)
def test_any_lines_are_a_score(said: list[Any], noise: str) -> None:
    outcomes = Outcomes(EXPECTED, *CANARIES, sown=[SOWN])
    text = "\n".join(f"{SECRET} {json.dumps(words)}" for words in said)
    outcomes.read(f"{text}\n{SECRET} {noise}", SECRET)
    assert 0.0 <= outcomes.score() <= 1.0
