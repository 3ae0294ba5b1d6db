"""The score in what an evaluator left: the last line that it printed, its JUnit XML, or a judge's verdict."""

from __future__ import annotations

import re
import xml.parsers.expat as expat

import msgspec

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class ScoreError(ValueError):
    """There is no score in it, and why. After `wait_s` it may be tried again."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


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


class _Verdict(msgspec.Struct, forbid_unknown_fields=True):
    score: float
    reason: str = ""


_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


def verdict_score(text: str) -> float:
    """A JSON object `{"reason": ..., "score": ...}`, in a code fence or not, and nothing beside it: a number
    that is merely mentioned is no verdict. Raises ScoreError."""
    text = text.strip()
    fenced = _FENCED.fullmatch(text)
    try:
        score = msgspec.json.decode((fenced[1] if fenced else text).encode(), type=_Verdict).score
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ScoreError(f"the judge's verdict is not as asked for ({error}): {text[:200]!r}") from error
    if not 0.0 <= score <= 1.0:
        raise ScoreError(f"the judge's score is not in [0, 1]: {score}")
    return score


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
