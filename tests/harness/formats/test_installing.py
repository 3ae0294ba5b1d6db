"""What a Dockerfile would install, asked of a package manager that says what a test wants."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.harness.formats import installing
from gyre.harness.formats.installing import lacking
from gyre.harness.task import TasksError

Manager = Callable[[str], None]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """Its query is the given script."""

    def make(script: str) -> None:
        (tmp_path / "dpkg-query").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "dpkg-query").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


# Each has a name of its own: answers are kept.
def test_a_package_for_two_architectures_is_here(manager: Manager) -> None:
    manager("for one in 1 2; do printf %s \"$3\" | sed 's/${[^}]*}/installed/'; done")
    assert lacking(["apt-get", "install", "no-such-twice"]) == ""


def test_a_package_that_was_removed_is_not(manager: Manager) -> None:
    manager("printf 'config-files\\n'")
    assert lacking(["apt-get", "install", "no-such-removed"]) == "the Debian package no-such-removed"


def test_no_answer_is_no_package_that_is_missing(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    manager("exec sleep 100")
    monkeypatch.setattr(installing, "_ANSWER_S", 0.2)
    with pytest.raises(TasksError, match=r"dpkg-query: did not tell within 0\.2 s whether no-such-slow is"):
        lacking(["apt", "install", "no-such-slow"])
