"""Reads plain data (what TOML holds) into msgspec Structs and names every fault, not only the first."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

StructT = TypeVar("StructT", bound=msgspec.Struct)

_NAMES = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    Path: "a path (a string)",
    list: "an array",
    dict: "a table",
}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong: the key's dotted path, what was found there, what is allowed, and the
    known key that was perhaps meant."""

    key: str
    found: str
    allowed: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{self.key}: {self.found}; allowed: {self.allowed}{hint}"


def decode(data: Mapping[str, Any], type_: type[StructT]) -> tuple[StructT, list[Fault]]:
    """The Struct and every fault. A faulty key has its default (or an empty value) in the Struct, so
    that rules about the other keys can still be checked."""
    faults: list[Fault] = []
    return _struct(data, type_, "", tuple(key_paths(type_)), faults), faults


def key_paths(type_: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """The dotted paths of all keys that a Struct type has, nested Structs included; `*` stands for the names
    in a table of tables."""
    for field in msgspec.structs.fields(type_):
        path = f"{prefix}{field.encode_name}"
        yield path
        if (inner := _struct_of(field.type)) is not None:
            yield from key_paths(inner, f"{path}.")
        elif (inner := _structs_of(field.type)) is not None:
            yield from key_paths(inner, f"{path}.*.")


def nearest_key(path: str, keys: tuple[str, ...]) -> str | None:
    """The known key that looks most like `path`: the same name in another table, then in its own table."""
    table, _, name = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == table}
    all_names = {key.rpartition(".")[2]: key for key in keys}
    for names, cutoff in ((all_names, 1.0), (siblings, 0.6), (all_names, 0.8)):
        if close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[close[0]]
    return None


def shown(value: object) -> str:
    """A found value as a person would write it, with its TOML type."""
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"found {text} ({_NAMES.get(type(value), type(value).__name__)})"


def allowed(type_: Any) -> str:
    """What a type admits, in words."""
    arguments = get_args(type_)
    if get_origin(type_) is Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if get_origin(type_) is tuple:
        if arguments[-1] is Ellipsis:
            return f"an array, each entry {allowed(arguments[0])}"
        return "an array of " + ", ".join(allowed(a) for a in arguments)
    if get_origin(type_) is dict:
        return f"a table, each value {allowed(arguments[1])}"
    if (bare := _without_none(type_)) is not type_:
        return allowed(bare)
    if _struct_of(type_) is not None:
        return "a table"
    return _NAMES.get(type_, getattr(type_, "__name__", str(type_)))


def _struct(
    data: Any, type_: type[StructT], path: str, keys: tuple[str, ...], faults: list[Fault]
) -> StructT:
    if not isinstance(data, Mapping):
        faults.append(Fault(key=path, found=shown(data), allowed="a table"))
        data = {}
    prefix = f"{path}." if path else ""
    fields = {field.encode_name: field for field in msgspec.structs.fields(type_)}
    for name in sorted(data.keys() - fields.keys()):
        faults.append(_unknown(path, name, tuple(fields), keys))
    values: dict[str, Any] = {}
    for name, field in fields.items():
        key = f"{prefix}{name}"
        inner = _struct_of(field.type)
        if inner is not None and (name in data or field.required):
            values[field.name] = _struct(data.get(name, {}), inner, key, keys, faults)
        elif (inner := _structs_of(field.type)) is not None and name in data:
            values[field.name] = _structs(data[name], inner, key, keys, faults)
        elif name in data:
            try:
                values[field.name] = msgspec.convert(data[name], field.type, dec_hook=_to_path)
            except msgspec.ValidationError:
                faults.append(_mistyped(key, data[name], field.type))
        elif field.required:
            faults.append(Fault(key=key, found="missing", allowed=allowed(field.type)))
        if field.required and field.name not in values:
            values[field.name] = _empty(field.type)
    return type_(**values)


def _structs(
    data: Any, type_: type[StructT], path: str, keys: tuple[str, ...], faults: list[Fault]
) -> dict[str, StructT]:
    if not isinstance(data, Mapping):
        faults.append(Fault(key=path, found=shown(data), allowed="a table of tables"))
        return {}
    found = {}
    for name, inner in data.items():
        own = tuple(key.replace(f"{path}.*.", f"{path}.{name}.") for key in keys)
        found[name] = _struct(inner, type_, f"{path}.{name}", own, faults)
    return found


def _unknown(path: str, name: str, fields: tuple[str, ...], keys: tuple[str, ...]) -> Fault:
    key = f"{path}.{name}" if path else name
    where = f"[{path}] has" if path else "the job file has"
    return Fault(
        key=key,
        found="unknown key",
        allowed=f"{where} {', '.join(fields)}",
        nearest=nearest_key(key, keys),
    )


def _mistyped(key: str, value: Any, type_: Any) -> Fault:
    choices = [a for a in get_args(type_) if isinstance(a, str)] if get_origin(type_) is Literal else []
    close = difflib.get_close_matches(str(value), choices, n=1)
    return Fault(key=key, found=shown(value), allowed=allowed(type_), nearest=close[0] if close else None)


def _empty(type_: Any) -> Any:
    return (get_origin(type_) or type_)()


def _to_path(type_: type, value: Any) -> Any:
    if type_ is Path and isinstance(value, str) and value and "\0" not in value:
        return Path(value)
    raise msgspec.ValidationError(f"not a path: {value!r}")


def _without_none(type_: Any) -> Any:
    if get_origin(type_) not in (types.UnionType, Union):
        return type_
    rest = [a for a in get_args(type_) if a is not type(None)]
    return rest[0] if len(rest) == 1 else type_


def _structs_of(type_: Any) -> type[msgspec.Struct] | None:
    """The Struct of a table of them by name."""
    return _struct_of(get_args(type_)[1]) if get_origin(type_) is dict else None


def _struct_of(type_: Any) -> type[msgspec.Struct] | None:
    bare = _without_none(type_)
    return bare if isinstance(bare, type) and issubclass(bare, msgspec.Struct) else None
