"""Runs hidden tests on a workspace and tells what becomes of each: `python -I pytest_runner.py ORDERS`.

The code under test runs in this very process, so what it can reach must not be worth reaching: each line is
written at once to a pipe, from which nothing can be taken back, and carries a secret; and tests that must
fail are run before all others, after them and, sown among the hidden ones, between them. What pytest needs is
imported before the workspace is on the path. No configuration, plugin or variable of it is looked at.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import _pytest
import pytest

Say = Callable[..., None]


class Teller:
    """A plugin: says what is begun and how it went."""

    def __init__(self, orders: dict[str, Any], say: Say, log_fd: int) -> None:
        self._say = say
        self._log_fd = log_fd
        self._first, self._last = orders["canaries"]
        self._done = set(orders["done"])
        self._limit_s = float(orders["test_timeout_s"])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        is_file = isinstance(collector, pytest.Module)
        if is_file:
            self._begin("file", collector.nodeid)
        report = yield
        if is_file:
            self._end("collected", collector.nodeid, report.outcome)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        canaries = {item.name: item for item in items}
        others = [item for item in items if item.name not in (self._first, self._last)]
        others = [item for item in others if item.nodeid not in self._done]
        items[:] = [canaries[self._first], *others, canaries[self._last]]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._begin("test", item.nodeid, _function(item))
        answer = yield
        self._end("tested", item.nodeid)
        return answer

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        self._say("phase", item.nodeid, report.when, report.outcome, _is_marked(item))
        return report

    def _begin(self, *words: Any) -> None:
        self._say(*words)
        # Its thread needs nothing of the interpreter, which a test may block.
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._log_fd)

    def _end(self, *words: Any) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._say(*words)


def _is_marked(item: pytest.Item) -> bool:
    """Whether the test itself may say that it is left out, in pytest's way or unittest's."""
    if any(item.get_closest_marker(name) for name in ("skip", "skipif", "xfail")):
        return True
    names = ("__unittest_skip__", "__unittest_expecting_failure__")
    places = (getattr(item, "obj", None), getattr(item, "cls", None))
    return any(getattr(place, name, False) for place in places for name in names)


def _function(item: pytest.Item) -> str:
    """The test's function, whatever its parameters."""
    name = getattr(item, "originalname", None) or item.name
    return f"{item.parent.nodeid}::{name}" if item.parent is not None else item.nodeid


def _sayer(out: int, secret: str) -> Say:
    def say(*words: Any) -> None:
        os.write(out, f"{secret} {json.dumps(words)}\n".encode())

    return say


def _arguments(tests: str, canary: str, lost: list[str]) -> list[str]:
    own = os.path.join(tests, "pytest.ini")
    configuration = own if os.path.isfile(own) else os.devnull
    ignored = [f"--ignore={os.path.join(tests, name)}" for name in lost]
    return [
        *("-c", configuration, f"--rootdir={tests}", f"--confcutdir={tests}"),
        *("-p", "no:cacheprovider", "-p", "no:faulthandler", "--continue-on-collection-errors"),
        # It is read before there is anybody who could write it.
        *("-q", "--tb=short", "--color=no", *ignored, canary, tests),
    ]


def main(path: str) -> None:
    orders = json.loads(Path(path).read_text(encoding="utf-8"))
    os.remove(path)
    # A copy is not inherited by what tests start, and their prints are no lines of ours.
    out, log_fd = os.dup(1), os.dup(2)
    os.dup2(2, 1)
    say = _sayer(out, orders.pop("secret"))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    for module in pkgutil.iter_modules(_pytest.__path__, "_pytest."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    plugins = [importlib.import_module(name) for name in orders["plugins"]]
    sys.path[0:0] = orders["path"]
    say("ready")
    arguments = _arguments(orders["tests"], orders["canary"], orders["lost"])
    pytest.main(arguments, plugins=[Teller(orders, say, log_fd), *plugins])


if __name__ == "__main__":
    main(sys.argv[1])
