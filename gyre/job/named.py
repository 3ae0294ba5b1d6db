"""Functions and classes that a job file names, looked for in the source: nothing is imported."""

from __future__ import annotations

import ast
import difflib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Literal

from gyre.job.decode import Fault, shown

Kind = Literal["function", "class"]

_NODES: dict[Kind, tuple[type[ast.AST], ...]] = {
    "function": (ast.FunctionDef, ast.AsyncFunctionDef),
    "class": (ast.ClassDef,),
}


def named_faults(key: str, name: str, kind: Kind, *, in_package: bool = True) -> Iterator[Fault]:
    """What is wrong with `file.py:NAME` or `package.module:NAME`; of a package only where `in_package`."""
    module, colon, found = name.rpartition(":")
    if not colon or not found.isidentifier() or not module:
        word = "Class" if kind == "class" else "function"
        yield Fault(key=key, found=shown(name), allowed=f"package.module:{word} or file.py:{word}")
    elif module.endswith(".py"):
        yield from _in_file(key, Path(module), module, found, kind)
    elif in_package:
        yield from _in_package(key, module, found, kind)


def _in_file(key: str, file: Path, module: str, name: str, kind: Kind) -> Iterator[Fault]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        yield Fault(key=key, found=f"cannot read {module}: {error}", allowed="a Python file")
        return
    names = [n.name for n in tree.body if isinstance(n, _NODES[kind])]  # type: ignore[attr-defined]
    imported = [a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    if name not in names + imported:
        yield Fault(
            key=key,
            found=f"no {kind} {name} in {module}",
            allowed=f"one of {', '.join(names)}" if names else "a file that defines it",
            nearest=_nearest(name, names),
        )


def _in_package(key: str, module: str, name: str, kind: Kind) -> Iterator[Fault]:
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for at, part in enumerate(parts):
        within = ".".join(parts[:at])
        if (path is None and at) or not part.isidentifier():
            yield _no_module(key, ".".join(parts[: at + 1]), within, ())
            return
        spec = PathFinder.find_spec(".".join(parts[: at + 1]), path)
        if spec is None:
            beside = [info.name for info in pkgutil.iter_modules(path if at else sys.path)]
            yield _no_module(key, ".".join(parts[: at + 1]), within, beside)
            return
        path = spec.submodule_search_locations
    if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
        yield from _in_file(key, Path(spec.origin), module, name, kind)


def _no_module(key: str, module: str, within: str, beside: Sequence[str]) -> Fault:
    allowed = f"a module of {within}" if within else "an installed package, or one on PYTHONPATH"
    near = _nearest(module.rpartition(".")[2], beside)
    nearest = f"{within}.{near}" if near and within else near
    return Fault(key=key, found=f"there is no module {module}", allowed=allowed, nearest=nearest)


def _nearest(name: str, names: Sequence[str]) -> str | None:
    close = difflib.get_close_matches(name, names, n=1)
    return close[0] if close else None
