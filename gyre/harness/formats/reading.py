"""Files of tasks, which anybody may have written: read as bounded text, decoded into typed tables."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from gyre.harness.task import TasksError

MAX_BYTES = 8 << 20
MAX_YAML_BYTES = 1 << 20
# The time that YAML takes grows with the square of it.
MAX_YAML_DEPTH = 32

T = TypeVar("T")


def read_text(path: Path, fix: str, max_bytes: int = MAX_BYTES) -> str:
    """A file's text, which is not empty. Raises TasksError."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise TasksError(str(path), f"has more than {max_bytes} bytes", fix)
        text = data.decode("utf-8")
    except FileNotFoundError:
        raise TasksError(str(path.parent), f"has no {path.name}", fix) from None
    except (OSError, ValueError) as error:
        raise TasksError(str(path), f"cannot be read ({error})", "make it a readable UTF-8 text") from error
    if not text.strip():
        raise TasksError(str(path), "is empty", fix)
    return text


def read_toml(path: Path, kind: type[T], fix: str) -> T:
    """Raises TasksError."""
    return _decoded(path, tomllib.loads, read_text(path, fix), kind, "TOML")


def read_yaml(path: Path, kind: type[T], fix: str) -> T:
    """Raises TasksError."""
    return _decoded(path, _yaml, read_text(path, fix, MAX_YAML_BYTES), kind, "YAML")


def read_json(path: Path, kind: type[T], fix: str) -> T:
    """Raises TasksError."""
    return _decoded(path, json.loads, read_text(path, fix), kind, "JSON")


def _yaml(text: str) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise ValueError(f"it is nested more than {MAX_YAML_DEPTH} deep")
    return yaml.load(text, Loader=loader)


def _decoded(path: Path, parse: Callable[[str], Any], text: str, kind: type[T], name: str) -> T:
    # What parsers raise for what they were not made for: numbers too long, dates that are none, depth.
    try:
        data = parse(text)
    except (ValueError, yaml.YAMLError, RecursionError, OverflowError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())[:300]
        raise TasksError(
            str(path), f"is no {name} ({said or type(error).__name__})", f"write {name}"
        ) from error
    try:
        return msgspec.convert(data, kind, strict=True)
    except (msgspec.ValidationError, RecursionError, TypeError, ValueError) as error:
        raise TasksError(str(path), f"is not as it should be: {error}", "see docs/tasks.md") from error
