"""What became of hidden tests, from the lines of `pytest_runner`, and the score in it. No I/O."""

from __future__ import annotations

import ast
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

import msgspec

_LINE = msgspec.json.Decoder(list[Any])


def functions_in(file: str, source: bytes) -> Iterator[str]:
    """The tests that a file defines under pytest's default names, as `file::Class::function`. Raises
    SyntaxError, ValueError."""
    yield from _in_body(file, ast.parse(source).body)


class Outcomes:
    """Each test function weighs the same, and of one that has several cases each case the same. `expected`
    are those that the files define: one that is not seen to pass did not pass. Those that their own marks
    skip do not count. `first` and `last` are the names of tests of each process that must fail, as must those
    that are `sown` among others: where one does not, `is_forged`, and nothing that was said is believed."""

    def __init__(self, expected: Iterable[str], first: str, last: str, sown: Iterable[str] = ()) -> None:
        self._expected = frozenset(expected)
        self._first = first
        self._last = last
        self._canaries = frozenset([first, last, *sown])
        self._function_of: dict[str, str] = {}
        self._phases: dict[str, list[tuple[str, str, bool]]] = defaultdict(list)
        self._tested: set[str] = set()
        self._files: set[str] = set()
        self._collected: set[str] = set()
        self._failed_canaries: set[str] = set()
        self.was_ready = False
        self.is_over = False
        self.is_forged = False

    @property
    def begun(self) -> list[str]:
        """Tests that were begun, in order, and need not be run again."""
        return list(self._function_of)

    @property
    def lost(self) -> list[str]:
        """Files that ended the process as they were imported."""
        return sorted(self._files - self._collected)

    def read(self, text: str, secret: str) -> None:
        """The lines of one more process; what else is among them is nobody's."""
        self._failed_canaries = set()
        for line in text.splitlines():
            given, _, said = line.partition(" ")
            if given == secret:
                with contextlib.suppress(msgspec.MsgspecError, TypeError, UnicodeEncodeError):
                    self._take(*_LINE.decode(said))
        self.is_over = self._last in self._failed_canaries

    def score(self) -> float:
        """In [0, 1]."""
        if self.is_forged:
            return 0.0
        cases: dict[str, list[float]] = {name: [] for name in self._expected}
        skipped: set[str] = set()
        for test in self.begun:
            function = self._function_of[test]
            worth = self._worth(test)
            if worth is None:
                skipped.add(function)
            else:
                cases.setdefault(function, []).append(worth)
        counted = [sum(found) / len(found) if found else 0.0 for found in _without(cases, skipped)]
        return sum(counted) / len(counted) if counted else 0.0

    def _worth(self, test: str) -> float | None:
        """None: it does not count."""
        phases = self._phases[test]
        if test not in self._tested or any(outcome == "failed" for _, outcome, _ in phases):
            return 0.0
        if any(outcome == "skipped" and marked for _, outcome, marked in phases):
            return None
        return float(("call", "passed") in {(when, outcome) for when, outcome, _ in phases})

    def _take(self, kind: str, *words: Any) -> None:
        match kind, words:
            case "ready", ():
                self.was_ready = True
            case "file", (str(file),):
                self._files.add(file)
            case "collected", (str(file), str()):
                self._collected.add(file)
            case "test", (str(test), str(function)) if not self._canary(test):
                self._function_of.setdefault(test, function)
                # The first of all must have failed by now.
                self.is_forged |= self._first not in self._failed_canaries
            case "phase", (str(test), str(when), str(outcome), bool(marked)):
                if (canary := self._canary(test)) is None:
                    self._phases[test].append((when, outcome, marked))
                elif outcome == "failed" or (when, outcome, marked) == ("setup", "skipped", False):
                    # A fixture of all tests may have ended it: then these do not pass either.
                    self._failed_canaries.add(canary)
                else:
                    self.is_forged |= when == "call" or outcome != "passed"
            case "tested", (str(test),):
                if (canary := self._canary(test)) is None:
                    self._tested.add(test)
                else:
                    self.is_forged |= canary not in self._failed_canaries

    def _canary(self, test: str) -> str | None:
        name = test.rpartition("::")[2]
        return name if name in self._canaries else None


def _without(cases: dict[str, list[float]], skipped: set[str]) -> Iterator[list[float]]:
    """A function all of whose cases were skipped does not count."""
    return (found for name, found in cases.items() if found or name not in skipped)


def _in_body(prefix: str, body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.name.startswith("test") and "fixture" not in map(_name, node.decorator_list):
                    yield f"{prefix}::{node.name}"
            case ast.ClassDef():
                if node.name.startswith("Test") or any("TestCase" in _name(base) for base in node.bases):
                    yield from _in_body(f"{prefix}::{node.name}", node.body)


def _name(node: ast.expr) -> str:
    """The last part of a dotted name, called or not."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_test_file(path: PurePosixPath) -> bool:
    """By pytest's default names."""
    return path.suffix == ".py" and (path.stem.startswith("test_") or path.stem.endswith("_test"))
