"""The score in what an evaluator left: the last line that it printed, or its JUnit XML."""

from __future__ import annotations

import re
import xml.parsers.expat as expat

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class ScoreError(ValueError):
    """There is no score in it, and why."""


def last_line_score(text: str) -> float:
    """The last line that is not blank, a number in [0, 1]. Raises ScoreError."""
    lines = text.strip().splitlines()
    if not lines:
        raise ScoreError("it printed nothing")
    last = lines[-1].strip()
    if not _NUMBER.fullmatch(last):
        raise ScoreError(f"its last line is no number: {last[:200]!r}")
    score = float(last)
    if not 0.0 <= score <= 1.0:
        raise ScoreError(f"its score is not in [0, 1]: {last[:200]}")
    return score


def junit_score(document: bytes) -> float:
    """Passed / total of a JUnit XML report: a test with a failure or an error in it did not pass, skipped
    ones do not count. Raises ScoreError, also where there is no test or a document type declaration."""
    counter = _Tests()
    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = _refuse
    parser.StartElementHandler = counter.start
    parser.EndElementHandler = counter.end
    try:
        parser.Parse(document, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        if isinstance(error, ScoreError):
            raise
        raise ScoreError(f"its report is no XML: {error}") from error
    if counter.root not in ("testsuites", "testsuite"):
        raise ScoreError(f"its report is no JUnit XML but a {counter.root}")
    if counter.total == 0:
        raise ScoreError("its report has no test")
    return counter.passed / counter.total


class _Tests:
    """Counts test cases by the outcome elements directly in them."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.passed = 0
        self.total = 0
        self._path: list[str] = []
        self._outcomes: set[str] = set()

    def start(self, name: str, _: dict[str, str]) -> None:
        name = name.rpartition(":")[2]
        self.root = self.root or name
        if self._path[-1:] == ["testcase"]:
            self._outcomes.add(name)
        self._path.append(name)
        if name == "testcase":
            self._outcomes = set()

    def end(self, _: str) -> None:
        if self._path.pop() != "testcase":
            return
        failed = not self._outcomes.isdisjoint({"failure", "error"})
        if failed or "skipped" not in self._outcomes:
            self.total += 1
            self.passed += not failed


def _refuse(*_: object) -> None:
    raise ScoreError("its report has a document type declaration")
