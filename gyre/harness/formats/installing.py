"""Commands of a Dockerfile that install something: here they have no effect, and what they install must be on
this machine already, in whatever version."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache

from gyre.harness.task import TasksError

_APT = ("apt", "apt-get")
_PIP = ("pip", "pip3")
_ANSWER_S = 30.0
_LISTS = "/var/lib/apt/lists/*"
_PYTHON = ["/usr/bin/python3", "/usr/bin/python"]
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[\w,.-]*\])?([<>=!~].*)?")
_BETWEEN = ("&&", ";")


def commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a shell's line, where these follow each other and nothing else. Raises
    ValueError."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[str] = []
    for word in [*lexer, ";"]:
        if word in _BETWEEN:
            if found:
                yield found
            found = []
        elif set(word) <= set("();<>|&") or "`" in word or "$" in word:
            raise ValueError(f"{word} in it")
        else:
            found.append(word)


def lacking(words: Sequence[str]) -> str | None:
    """What a command would install that is not here, "" if there is nothing; None of another command. Raises
    TasksError."""
    match [word for word in words if not word.startswith("-")]:
        case [program, ("update" | "clean" | "autoclean" | "autoremove")] if program in _APT:
            return ""
        case [program, "install", *packages] if program in _APT:
            return next((f"the Debian package {name}" for name in packages if not _has_package(name)), "")
        case [program, "install", *packages] if program in _PIP:
            return _python_lacks(packages)
        case [("python" | "python3"), "pip", "install", *packages] if "-m" in words:
            return _python_lacks(packages)
        case ["rm", *paths] if paths and set(paths) == {_LISTS}:
            return ""
        case ["ln", *paths] if paths == _PYTHON:
            return "" if shutil.which("python3") else "python3"
    return None


def _python_lacks(packages: Sequence[str]) -> str:
    for package in packages:
        named = _REQUIREMENT.fullmatch(package)
        if named is None or not _has_distribution(named[1]):
            return f"the Python package {package}"
    return ""


@cache
def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    return True


@cache
def _has_package(name: str) -> bool:
    program = shutil.which("dpkg-query")
    if program is None or not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name):
        return False
    # It has a line of each architecture that the package is here for.
    query = [program, "-W", "-f", "${db:Status-Status}\n", "--", name]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired as error:
        problem = f"did not tell within {_ANSWER_S:g} s whether {name} is installed"
        raise TasksError(program, problem, "try again when this machine is less busy") from error
    return "installed" in found.stdout.splitlines()
