"""What of a Dockerfile can be had without Docker: files copied into one working directory.

The programs of the image are not: a sandbox has those of this machine. So an image may be one of a bare
system, and a command that runs while it is built is refused, unless it makes folders or installs what is
here already.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from gyre.harness.formats.installing import commands, lacking
from gyre.harness.formats.reading import read_text
from gyre.harness.task import Part, TasksError

_NO_DOCKER = (
    "there is no sandbox for Docker or Podman here: a task whose Dockerfile only has FROM (debian, ubuntu or "
    "python), WORKDIR, COPY, ADD, ENV, and RUN to make folders or to install what is installed here too, "
    "runs in bubblewrap with the programs of this machine"
)
# By the last part of its name, such as ghcr.io/x/python-3-13:20250620.
_BARE = re.compile(r"(debian|ubuntu|python)[0-9._-]*")
_TEMPORARY = PurePosixPath("/tmp")
# They say nothing about files, or about a process that does not run here.
_WITHOUT_EFFECT = frozenset(["ARG", "CMD", "EXPOSE", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL", "USER"])
# A sandbox has something else there.
_TAKEN = re.compile(
    r"/|/(bin|dev|etc|gyre|lib|lib32|lib64|libx32|logs|orders|proc|report|sbin|sys|task|tests|tmp|usr|var/tmp"
    r"|home/agent)(/.*)?"
)


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """`workdir` is absolute, in it lie `parts`."""

    workdir: str
    parts: tuple[Part, ...]
    environment: dict[str, str]


def read_image(path: Path, context: Path, workdir: str | None = None) -> Image:
    """Of a Dockerfile and the folder of its build; `workdir` overrules the last of its own. Raises
    TasksError."""
    return _Reader(path, context).image(read_text(path, "write a Dockerfile there"), workdir)


def refused(path: Path, problem: str) -> TasksError:
    """Of what needs Docker."""
    return TasksError(str(path), f"needs Docker: {problem}", _NO_DOCKER)


class _Reader:
    def __init__(self, path: Path, context: Path) -> None:
        self._path = path
        self._context = context
        self._line = 0
        self._has_base = False
        self._workdir = PurePosixPath("/")
        self._placed: list[tuple[int, Path | None, PurePosixPath]] = []
        self._environment: dict[str, str] = {}

    def image(self, text: str, workdir: str | None) -> Image:
        for self._line, word, rest in _instructions(text):
            if word not in _WITHOUT_EFFECT:
                self._take(word, rest)
        if not self._has_base:
            raise TasksError(str(self._path), "has no FROM", "begin it with FROM debian, for instance")
        if workdir is not None:
            self._workdir = self._absolute(workdir)
        found = str(self._workdir)
        if _TAKEN.fullmatch(found):
            problem = f"its working directory is {found}"
            raise TasksError(str(self._path), problem, "add a WORKDIR of the task's own, such as /app")
        return Image(workdir=found, parts=tuple(self._parts()), environment=self._environment)

    def _take(self, word: str, rest: str) -> None:
        match word:
            case "FROM":
                self._from(rest)
            case "WORKDIR":
                self._workdir = self._absolute(rest.strip().strip("\"'"))
            case "ENV":
                self._set(rest)
            case "COPY" | "ADD":
                self._copy(word, rest)
            case "RUN":
                self._run(rest)
            case _:
                raise self._refused(f"{word} {rest}")

    def _from(self, rest: str) -> None:
        words = [word for word in rest.split() if not word.startswith("--")]
        name = words[0].partition("@")[0].rpartition("/")[2].partition(":")[0] if words else ""
        if self._has_base:
            raise self._refused("a second FROM")
        if not _BARE.fullmatch(name):
            raise self._refused(f"the image {rest.strip()}")
        self._has_base = True

    def _set(self, rest: str) -> None:
        """`NAME=VALUE ...`, or the old `NAME VALUE`."""
        words = self._words(rest)
        if words and "=" not in words[0]:
            words = [f"{words[0]}={' '.join(words[1:])}"]
        for name, equals, value in (word.partition("=") for word in words):
            if not equals or not name.isidentifier() or "$" in value or "\0" in value:
                raise self._refused(f"ENV {rest}")
            self._environment[name] = value

    def _copy(self, word: str, rest: str) -> None:
        words = self._words(rest) if not rest.lstrip().startswith("[") else self._list(rest)
        flags = [found for found in words if found.startswith("--")]
        if any(not flag.startswith(("--chown=", "--chmod=", "--link")) for flag in flags) or "<<" in rest:
            raise self._refused(f"{word} {rest}")
        *sources, target = [found for found in words if not found.startswith("--")] or [""]
        if not sources:
            raise TasksError(*self._wrong(f"{word} {rest}"), f"write {word} SOURCE TARGET")
        to = self._absolute(target)
        many = len(sources) > 1 or target.endswith("/") or target in (".", "./")
        for source in sources:
            for found in self._found(word, source):
                is_folder = found.is_dir()
                self._placed.append((self._line, found, to / found.name if many and not is_folder else to))

    def _found(self, word: str, source: str) -> list[Path]:
        inside = PurePosixPath("/", source).relative_to("/")
        archive = word == "ADD" and re.search(r"\.(tar|tgz|tbz2|txz|gz|bz2|xz|zst)$", source)
        if "://" in source or source.startswith("git@") or archive:
            raise self._refused(f"{word} {source}")
        if ".." in inside.parts or "\0" in source or "$" in source:
            raise TasksError(*self._wrong(f"{word} {source}"), "name a path below the Dockerfile's folder")
        try:
            found = sorted(self._context.glob(str(inside))) if inside.parts else [self._context]
            found = [path for path in found if path.resolve().is_relative_to(self._context.resolve())]
            has_folder = any(path.is_dir() for path in found)
        except (OSError, ValueError, NotImplementedError, RuntimeError):
            found, has_folder = [], False
        if not found:
            fix = f"put {source} into {self._context}"
            raise TasksError(*self._wrong(f"{source} is not there"), fix)
        if has_folder and (self._context / ".dockerignore").exists():
            fix = f"remove {self._context / '.dockerignore'}, which is not heeded, or copy single files"
            raise TasksError(*self._wrong(f"{word} {source} copies a folder"), fix)
        return found

    def _run(self, rest: str) -> None:
        try:
            found = [self._list(rest)] if rest.lstrip().startswith("[") else list(commands(rest))
        except ValueError:
            raise self._refused(f"RUN {rest}") from None
        for words in found:
            if words[:2] == ["mkdir", "-p"] and not set("*?[{~") & set("".join(words)):
                self._placed += [(self._line, None, self._absolute(word)) for word in words[2:]]
            elif (wanted := lacking(words)) is None:
                raise self._refused(f"RUN {rest}")
            elif wanted:
                fix = "install it on this machine, beside gyre, or drop it where the task does not need it"
                raise TasksError(*self._wrong(f"wants {wanted}, which is not here"), fix)

    def _parts(self) -> Iterator[Part]:
        for line, source, path in self._placed:
            if source is None and (path == _TEMPORARY or self._workdir.is_relative_to(path)):
                continue  # it is there anyhow
            if not path.is_relative_to(self._workdir):
                self._line = line
                raise self._refused(f"{path} is outside of {self._workdir}")
            target = path.relative_to(self._workdir).as_posix()
            yield Part(source, "" if target == "." else target)

    def _absolute(self, path: str) -> PurePosixPath:
        found = PurePosixPath("/", self._workdir, path)
        if not path or "$" in path or "\0" in path or ".." in found.parts:
            raise TasksError(*self._wrong(f"the path {path!r}"), "write it without variables and '..'")
        return found

    def _words(self, rest: str) -> list[str]:
        try:
            return shlex.split(rest)
        except ValueError as error:
            raise TasksError(*self._wrong(str(error)), "close its quotes") from error

    def _list(self, rest: str) -> list[str]:
        try:
            words = json.loads(rest)
        except (ValueError, RecursionError):
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise TasksError(*self._wrong(rest[:200]), "write a JSON list of words")
        return words

    def _wrong(self, problem: str) -> tuple[str, str]:
        return f"{self._path}, line {self._line}", problem[:300]

    def _refused(self, what: str) -> TasksError:
        place, problem = self._wrong(what.strip())
        return TasksError(place, f"needs Docker: {problem}", _NO_DOCKER)


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, instruction and the rest, with lines that are continued joined."""
    begun, number = "", 0
    for at, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and begun):
            continue
        number = number if begun else at
        begun += line
        if begun.endswith("\\"):
            begun = begun[:-1] + " "
        elif begun.strip():
            word, _, rest = begun.strip().partition(" ")
            yield number, word.upper(), rest
            begun = ""
        else:
            begun = ""
    if begun.strip():
        word, _, rest = begun.strip().partition(" ")
        yield number, word.upper(), rest
