"""Writes rows to a file, JSON lines or Parquet, whole or not at all."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gyre.recorded.rows import Line

# Of numbers in lists: what is held in memory until it is written.
ROW_GROUP_NUMBERS = 1_000_000
ROW_GROUP_ROWS = 10_000


class ExportError(Exception):
    """Nothing was written to `path`."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class _Writer(Protocol):
    def write(self, line: Line) -> None: ...
    def close(self) -> None: ...


def export(path: Path, kind: type[Line], lines: Iterable[Line]) -> int:
    """How many rows were written. What is at `path` is replaced when all are. Raises ExportError, and what
    reading raises."""
    draft = path.with_name(f"{path.name}.part")
    count = 0
    try:
        writer = _writer(path, draft, kind)
        try:
            for line in lines:
                writer.write(line)
                count += 1
        finally:
            writer.close()
        draft.replace(path)
    except OSError as error:
        raise ExportError(path, f"cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return count


def check_path(path: Path) -> None:
    """Before anything is read. Raises ExportError."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ExportError(path, "rows are written to a file that ends in .jsonl or .parquet")
    if not path.parent.is_dir():
        raise ExportError(path, f"there is no folder {path.parent}")
    if path.suffix == ".parquet":
        _pyarrow(path)


def _writer(path: Path, draft: Path, kind: type[Line]) -> _Writer:
    return _Parquet(draft, kind, _pyarrow(path)) if path.suffix == ".parquet" else _JsonLines(draft)


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._encoder = msgspec.json.Encoder()

    def write(self, line: Line) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()


class _Parquet:
    def __init__(self, path: Path, kind: type[Line], pyarrow: Any) -> None:
        self._pyarrow = pyarrow
        columns = typing.get_type_hints(kind).items()
        self._schema = pyarrow.schema(
            [pyarrow.field(name, _arrow(type_, pyarrow)) for name, type_ in columns]
        )
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._numbers = 0

    def write(self, line: Line) -> None:
        row = msgspec.structs.asdict(line)
        self._numbers += sum(len(value) for value in row.values() if isinstance(value, list))
        # A map is a list of pairs to Arrow.
        self._rows.append({k: [*v.items()] if isinstance(v, dict) else v for k, v in row.items()})
        if self._numbers >= ROW_GROUP_NUMBERS or len(self._rows) >= ROW_GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._pyarrow.Table.from_pylist(self._rows, schema=self._schema))
            self._rows, self._numbers = [], 0


def _arrow(type_: Any, pyarrow: Any) -> Any:
    """Arrow's name for the type of a field."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin is list:
        element = {int: pyarrow.int32(), float: pyarrow.float32(), bool: pyarrow.bool_()}[arguments[0]]
        return pyarrow.list_(element)
    if origin is dict:
        return pyarrow.map_(pyarrow.string(), pyarrow.int64())
    if origin is types.UnionType:
        (type_,) = (argument for argument in arguments if argument is not types.NoneType)
    return {int: pyarrow.int64(), float: pyarrow.float64()}.get(type_, pyarrow.string())


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        fix = "install it with `pip install 'gyre[parquet]'`, or export to a .jsonl file"
        raise ExportError(
            path, f"Parquet needs pyarrow, which cannot be imported ({error}): {fix}"
        ) from error
    return pyarrow
