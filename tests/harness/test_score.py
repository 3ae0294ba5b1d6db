import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.harness.score import ScoreError, junit_score, last_line_score, verdict_score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("1", 1.0),
        ("0", 0.0),
        ("running\n0.25\n\n", 0.25),
        ("0.5\n  .75  ", 0.75),
        ("1e-1", 0.1),
        ("+1.", 1.0),
    ],
)
def test_the_last_line_is_the_score(text: str, score: float) -> None:
    assert last_line_score(text) == score


@pytest.mark.parametrize(
    "text",
    ["", " \n", "nan", "inf", "1.5", "-0.1", "0.5 points", "0x1", "1_0", "\u0660", "true", "0.5\ndone"],
)
def test_anything_else_is_no_score(text: str) -> None:
    with pytest.raises(ScoreError):
        last_line_score(text)


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        assert 0.0 <= last_line_score(text) <= 1.0
    except ScoreError as error:
        assert str(error)


def report(*cases: str) -> bytes:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>".encode()


PASSED = '<testcase name="a"/>'
FAILED = '<testcase name="b"><failure message="no"/></testcase>'
BROKEN = '<testcase name="c"><error/><system-out>x</system-out></testcase>'
SKIPPED = '<testcase name="d"><skipped/></testcase>'


@pytest.mark.parametrize(
    ("cases", "score"),
    [
        ((PASSED,), 1.0),
        ((PASSED, FAILED), 0.5),
        ((PASSED, FAILED, BROKEN, PASSED), 0.5),
        ((PASSED, SKIPPED, SKIPPED), 1.0),
        ((BROKEN,), 0.0),
    ],
)
def test_junit_is_passed_by_total_without_skipped_ones(cases: tuple[str, ...], score: float) -> None:
    assert junit_score(report(*cases)) == score


def test_junit_of_one_suite_without_a_root_for_all() -> None:
    assert junit_score(b"<testsuite><testcase/></testsuite>") == 1.0


def test_junit_outcomes_of_nested_elements_are_not_the_tests() -> None:
    case = "<testcase><properties><failure/></properties></testcase>"
    assert junit_score(report(case)) == 1.0


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"0.5",
        b"<testsuite><testcase>",
        b"<html><testcase/></html>",
        b"<testsuites/>",
        b"<testsuite>" + SKIPPED.encode() + b"</testsuite>",
        b'<?xml version="1.0" encoding="no-such"?><testsuite><testcase/></testsuite>',
    ],
)
def test_other_documents_are_no_junit(document: bytes) -> None:
    with pytest.raises(ScoreError):
        junit_score(document)


def test_junit_with_entities_is_refused() -> None:
    bomb = b'<!DOCTYPE t [<!ENTITY a "x"><!ENTITY b "&a;&a;">]><testsuite><testcase name="&b;"/></testsuite>'
    with pytest.raises(ScoreError, match="document type"):
        junit_score(bomb)


@given(st.binary())
def test_no_document_breaks_the_junit_parser(document: bytes) -> None:
    with pytest.raises(ScoreError):
        junit_score(document)


@given(st.lists(st.sampled_from([PASSED, FAILED, BROKEN, SKIPPED])))
def test_junit_counts_each_test_once(cases: list[str]) -> None:
    counted = [case for case in cases if case != SKIPPED]
    if not counted:
        with pytest.raises(ScoreError):
            junit_score(report(*cases))
    else:
        assert junit_score(report(*cases)) == counted.count(PASSED) / len(counted)


VERDICTS = [
    ('{"reason": "good", "score": 0.75}', 0.75),
    (' {"score": 1}\n', 1.0),
    ('```json\n{"score": 0, "reason": "no"}\n```', 0.0),
    ('```\n{\n"score": 0.5}\n```\n', 0.5),
]


@pytest.mark.parametrize(("text", "score"), VERDICTS)
def test_a_verdict_is_one_json_object(text: str, score: float) -> None:
    assert verdict_score(text) == score


NO_VERDICTS = [
    "",
    "0.9",
    "I would say 0.9",
    'Here it is: {"score": 0.9}',
    '{"score": 0.9} {"score": 0.1}',
    '{"score": "0.9"}',
    '{"score": true}',
    '{"score": null}',
    '{"reason": "good"}',
    '{"score": 0.9, "confidence": 1}',
    '{"score": 1.5}',
    '{"score": -0.1}',
    '{"score": NaN}',
    '{"score": 1e999}',
    "[" * 100_000,
    '{"score": 0.9, "reason": "\ud800"}',
]


@pytest.mark.parametrize("text", NO_VERDICTS, ids=range(len(NO_VERDICTS)))
def test_what_is_not_as_asked_for_is_no_verdict(text: str) -> None:
    with pytest.raises(ScoreError, match="the judge's"):
        verdict_score(text)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=30) | st.text(max_size=8).map(lambda inner: f'{{"score": {inner}}}'))
def test_any_text_is_a_verdict_or_none(text: str) -> None:
    try:
        assert 0.0 <= verdict_score(text) <= 1.0
    except ScoreError as error:
        assert "the judge's" in str(error)
