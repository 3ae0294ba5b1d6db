"""Tests that must fail, sown among hidden tests, whose names and places are as theirs. No I/O."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from random import Random

from gyre.harness.outcomes import functions_in

SOWN = 4
# Its marks are of all tests in a file, and some ask for arguments.
MARKS = b"pytestmark"


def sow(sources: Mapping[str, bytes], random: Random) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """What becomes of files with `SOWN` more tests in all, at random places between others, and the names of
    those. Where no file can take one, there is one more file. Raises SyntaxError, ValueError."""
    functions = {file: list(functions_in(file, source)) for file, source in sources.items()}
    known = [function.rpartition("::")[2] for found in functions.values() for function in found]
    able = [file for file, found in functions.items() if found and MARKS not in sources[file]]
    if not able:
        beside = PurePosixPath(random.choice([*sources]))
        able = [
            str(beside.with_name(f"{_like([PurePosixPath(file).stem for file in sources], (), random)}.py"))
        ]
    changed: dict[str, bytes] = {}
    names: list[str] = []
    for _ in range(SOWN):
        file = random.choice(able)
        name = _like(known, [*sources.values(), *changed.values()], random)
        changed[file] = _with_failing(changed.get(file, sources.get(file, b"")), name, random)
        names.append(name)
    return changed, tuple(names)


def _like(names: list[str], sources: Iterable[bytes], random: Random) -> str:
    """A name of the words of these, that is in none of the sources."""
    words = sorted({word for name in names for word in name.split("_") if word and word != "test"})
    while True:
        found = random.choices([*words, *"123456789"], k=random.randrange(2, 5))
        name = "_".join(["test", *found])
        if name not in names and not any(name.encode() in source for source in sources):
            return name


def _with_failing(source: bytes, name: str, random: Random) -> bytes:
    """One more test, before one of those at the top level or after all."""
    lines = source.splitlines(keepends=True)
    if lines and not lines[-1].endswith((b"\n", b"\r")):
        lines[-1] += b"\n"
    low = random.randrange(1000)
    test = f"def {name}():\n    assert {low} == {low + random.randrange(1, 1000)}\n\n\n".encode()
    starts = [
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name.lower().startswith("test")
    ]
    # The first line may begin with a mark of the encoding.
    at = random.choice([*filter(None, starts), len(lines)])
    return b"".join([*lines[:at], test, *lines[at:]])
