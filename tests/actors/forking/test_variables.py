"""A process may be forked under another environment where nothing imported has asked for the difference."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from gyre.actors.forking.variables import matters, watched


@pytest.mark.parametrize(
    "ask",
    [
        lambda name: name in os.environ,
        lambda name: os.environ.get(name),
        lambda name: os.getenv(name),
        lambda name: os.environ.pop(name, None),
        lambda name: os.environ.setdefault(name, ""),
        lambda name: dict(os.environ),
        lambda name: os.environ.copy(),
        lambda name: [*os.environ.items()],
    ],
)
def test_what_is_asked_for_matters(ask: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORK_TEST", "")
    asked_for: set[str] = set()
    usual = type(os.environ)
    with watched(asked_for):
        os.environ["FORK_TEST_SET"] = ""
        del os.environ["FORK_TEST_SET"]
        ask("FORK_TEST")
    assert type(os.environ) is usual
    assert matters("FORK_TEST", asked_for)
    assert not matters("FORK_TEST_SET", asked_for)
    os.environ.get("FORK_TEST_LATER")
    assert not matters("FORK_TEST_LATER", asked_for)


@pytest.mark.parametrize("name", ["UCXX_LOG_LEVEL", "UCX_TLS", "NCCL_DEBUG", "GYRE_X", "PYTHONPATH", "RANK"])
def test_what_is_read_after_does_not_matter(name: str) -> None:
    assert not matters(name, set())


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "PYTHONHASHSEED", "OMP_PLACES", "MKL_DYNAMIC", "TZ"],
)
def test_what_no_python_code_reads_when_it_is_loaded_matters(name: str) -> None:
    assert matters(name, set())
