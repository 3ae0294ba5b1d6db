"""The program of a preset on this machine: where it is, which version, what it needs to run elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gyre.harness.bubblewrap import SYSTEM
from gyre.harness.commands import SEARCHED
from gyre.harness.presets.preset import Preset
from gyre.harness.pythons import is_environment, parts_of
from gyre.harness.sandbox import Mount

VERSION_TIMEOUT_S = 60.0
LONGEST_REASON = 300
_VERSION = re.compile(r"\d+(?:\.\d+)+[\w.+-]*", re.ASCII)
# How pip names a Python whose path is too long for a first line.
_THROUGH_SHELL = re.compile(r"""'''exec' "?(.+?)"? "\$0" """)


class PresetMissing(Exception):
    """The harness of a preset cannot be started on this machine."""

    def __init__(self, preset: Preset, problem: str, fix: str) -> None:
        super().__init__(f"harness.preset = {preset.name!r}: {problem}; {fix}")
        self.preset = preset.name
        self.problem = problem
        self.fix = fix


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """`program` is a real path, `version` as it says. With `mounts` it runs at the same paths where there is
    nothing but the system's folders; `path` is where it finds what it needs."""

    program: str
    version: str
    path: str
    mounts: tuple[Mount, ...]


def installed(preset: Preset, program: Path | None = None, version: str = "") -> Installed:
    """Looks for `program`, by default by its name, and asks it for its version, which must be `version`, by
    default the preset's. Blocking, as long as the program takes. Raises PresetMissing."""
    real = _found(preset, program)
    interpreter = _interpreter(real)
    _check_python(preset, real, interpreter)
    found, wanted = _version(preset, real, interpreter), version or preset.version
    if found != wanted:
        problem = f"{real} is version {found}, wanted is {wanted}"
        fix = f"install it ({preset.install})" if wanted == preset.version else "install that one"
        raise PresetMissing(preset, problem, f'{fix}, or set harness.version = "{found}" to use this one')
    needed = dict.fromkeys(_needed(real, interpreter))
    return Installed(
        program=str(real),
        version=found,
        path=":".join([*SEARCHED, *_folder_of(interpreter)]),
        mounts=tuple(Mount(host=path, inside=str(path)) for path in needed),
    )


def _found(preset: Preset, program: Path | None) -> Path:
    searched = ":".join([*SEARCHED, os.environ.get("PATH", "")])
    found = shutil.which(program or preset.program, path=searched)
    if found is not None:
        return Path(found).resolve()
    if program is not None:
        fix = f"install it ({preset.install}) and name its path"
        raise PresetMissing(preset, f"harness.program: there is no program {program}", fix)
    problem = f"there is no program {preset.program} beside this Python, in the system's folders or on PATH"
    raise PresetMissing(
        preset, problem, f"install it ({preset.install}), or name its path in harness.program"
    )


def _interpreter(program: Path) -> Path | None:
    """What runs a script, as its first line names it. A link to it may be how it knows its packages."""
    with program.open("rb") as file:
        first, second = (file.readline(4096).decode(errors="replace") for _ in range(2))
    if not first.startswith("#!"):
        return None
    words = first[2:].split()
    if through := _THROUGH_SHELL.match(second):
        words = [through[1]]
    if words[:1] == ["/usr/bin/env"]:
        found = shutil.which(words[-1], path=":".join([*SEARCHED, os.environ.get("PATH", "")]))
        return None if found is None else Path(found)
    return Path(words[0]) if words else None


def _version(preset: Preset, program: Path, interpreter: Path | None) -> str:
    command = [str(program), "--version"]
    if preset.distribution is not None and interpreter is not None:
        ask = f"import importlib.metadata as m; print(m.version({preset.distribution!r}))"
        command = [str(interpreter), "-c", ask]
    path = ":".join([*SEARCHED, *_folder_of(interpreter)])
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": path, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
        try:
            told = subprocess.run(
                command, env=environment, cwd=home, capture_output=True, timeout=VERSION_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PresetMissing(preset, f"{program} cannot be run: {error}", preset.install) from error
    found = version_in(told.stdout.decode(errors="replace"))
    if told.returncode or found is None:
        said = " ".join((told.stderr or told.stdout).decode(errors="replace").split())[-LONGEST_REASON:]
        problem = f"{program} does not tell its version (exit {told.returncode}): {said or 'it says nothing'}"
        raise PresetMissing(preset, problem, f"install it again ({preset.install})")
    return found


def version_in(text: str) -> str | None:
    """The first that a program tells."""
    found = _VERSION.search(text)
    return None if found is None else found[0]


def _needed(program: Path, interpreter: Path | None) -> Iterator[Path]:
    """What of the program lies outside of the system's folders: the npm packages that it is one of, the
    Python environment that it is in and the Python that this is made of, or itself alone."""
    real = None if interpreter is None else interpreter.resolve()
    if interpreter is not None and real is not None and _is_python(real):
        environments = [path.parent.parent for path in (interpreter, real)]
        parts = [part for folder in environments if is_environment(folder) for part in parts_of(folder)]
        yield from _outside(*parts)
        if not any(program.is_relative_to(part) for part in parts):
            yield from _outside(program)
        if not any(interpreter.is_relative_to(part) for part in parts):
            yield from _outside(interpreter)
        return
    if "node_modules" in program.parts:
        yield from _outside(Path(*program.parts[: program.parts.index("node_modules") + 1]))
    else:
        yield from _outside(program)
    if interpreter is not None and real is not None:
        yield from _outside(interpreter, real)


def _is_python(real: Path) -> bool:
    return real.name.startswith("python")


def _check_python(preset: Preset, program: Path, interpreter: Path | None) -> None:
    """A link to a Python is a copy in a sandbox, and of a copy only the system's finds what it needs."""
    if interpreter is None or is_environment(interpreter.parent.parent):
        return
    real = interpreter.resolve()
    if _is_python(real) and any(_outside(real)):
        problem = f"the interpreter of {program}, {interpreter}, is in no Python environment"
        raise PresetMissing(preset, problem, f"install it in one ({preset.install})")


def _outside(*paths: Path) -> Iterator[Path]:
    for path in paths:
        if f"/{path.parts[1]}" not in SYSTEM:
            yield path


def _folder_of(interpreter: Path | None) -> tuple[str, ...]:
    return () if interpreter is None or str(interpreter.parent) in SEARCHED else (str(interpreter.parent),)
