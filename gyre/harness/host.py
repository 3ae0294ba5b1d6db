"""Where a user's harness actor lives: imported, built from its options, watched."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gyre.actors import Actor, Ask, ChildSpec, ProcessSpec, Ref, Spec, handles
from gyre.cell.recipes import RecipeError, load_function
from gyre.harness.config import HarnessConfig
from gyre.harness.custom import Harness
from gyre.harness.guardian import MARK

SHUTDOWN_S = 10.0
ACTOR, OPTIONS = "harness.actor", "harness.options"


class HarnessActorError(Exception):
    """`[harness] actor` or its options cannot be used: `key` is the place in the job file."""

    def __init__(self, key: str, problem: str, fix: str) -> None:
        super().__init__(f"{key}: {problem}; {fix}")
        self.key = key
        self.problem = problem
        self.fix = fix


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`actor` is `package.module:Class` or `file.py:Class`."""

    actor: str
    options: dict[str, Any]


class FindHarness(Ask[Ref], frozen=True, kw_only=True):
    """To a Host: the user's actor. It is the same as long as the Host lives."""


class Host(Actor):
    """The parent of a user's harness actor, in whatever process: a crash of the one is that of the other."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config

    async def started(self) -> None:
        """Raises HarnessActorError, or what the actor's own start raises."""
        start = load_harness(self._config.actor, self._config.options)
        spec = ChildSpec(name="custom", start=start, restart="temporary", shutdown_s=SHUTDOWN_S)
        self._harness = await self.context.spawn(spec)

    @handles(FindHarness)
    async def find(self, _: FindHarness) -> Ref:
        return self._harness


def host_spec(config: HarnessConfig, mark: str, log_path: Path) -> Spec:
    """The Host of a job. With a process of its own, `mark` is in that process' environment."""
    assert config.actor is not None
    host = HostConfig(actor=config.actor, options=config.options)
    shutdown_s = SHUTDOWN_S + 2.0
    if not config.own_process:
        return ChildSpec(name="host", start=partial(Host, host), shutdown_s=shutdown_s)
    return ProcessSpec(
        name="host",
        actor=f"{Host.__module__}:{Host.__qualname__}",
        config=host,
        environment={**config.environment, MARK: mark},
        log_path=log_path,
        shutdown_s=shutdown_s,
    )


def load_harness(actor: str, options: Mapping[str, Any]) -> Callable[[], Harness]:
    """Imports a user's class and decodes its options; what makes a new one. Raises HarnessActorError."""
    try:
        found: Any = load_function(actor)
    except RecipeError as error:
        raise HarnessActorError(ACTOR, f"{error.name} {error.problem}", error.fix) from error
    if not (isinstance(found, type) and issubclass(found, Harness)):
        raise HarnessActorError(ACTOR, f"{actor} is no harness", "derive it from gyre.harness.Harness")
    hints = {name: hint for name, hint in typing.get_type_hints(found.__init__).items() if name != "return"}
    if not hints:
        if options:
            problem = f"{actor} takes none, found {', '.join(options)}"
            raise HarnessActorError(OPTIONS, problem, "annotate its constructor's argument with a Struct")
        return found
    kind = next(iter(hints.values()))
    if len(hints) > 1 or not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        problem = f"the constructor of {actor} takes {', '.join(hints)}"
        raise HarnessActorError(ACTOR, problem, "give it one argument, annotated with a msgspec Struct")
    return partial(found, _decoded(kind, options))


def _decoded(kind: type[msgspec.Struct], options: Mapping[str, Any]) -> msgspec.Struct:
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            fix = f"{kind.__name__} has {', '.join(names) or 'none'}"
            fix += f"; did you mean {OPTIONS}.{close[0]}?" if close else ""
            raise HarnessActorError(f"{OPTIONS}.{name}", "unknown key", fix)
    try:
        return msgspec.convert(options, kind, dec_hook=_to_path)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        raise HarnessActorError(
            f"{OPTIONS}{place.rstrip('`')}", problem, f"it is decoded to {kind.__name__}"
        ) from error


def _to_path(type_: type, value: Any) -> Any:
    if issubclass(type_, Path) and isinstance(value, str):
        return type_(value)
    raise msgspec.ValidationError(f"{value!r} cannot be a {type_.__name__}")
