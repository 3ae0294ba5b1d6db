"""A Hugging Face model folder, looked at before any process is started."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

LONGEST_HEADER_BYTES = 100_000_000


class ModelFolderError(Exception):
    """`folder` is no model that can be loaded; `problem` says why, `fix` what to do."""

    def __init__(self, folder: Path, problem: str, fix: str) -> None:
        super().__init__(f"model folder {folder}: {problem}; {fix}")
        self.folder = folder
        self.problem = problem
        self.fix = fix


def check_model_folder(folder: Path, fix: str = "save the model there again, or name another folder") -> None:
    """Whether config and weights are there and whole, as far as can be told without loading them. Raises
    ModelFolderError, with `fix` as what to do."""
    try:
        if not isinstance(_json_object(folder / "config.json").get("model_type"), str):
            raise ValueError("config.json names no model_type")
        for path in _weight_files(folder):
            if not path.is_file():
                raise ValueError(f"has no {path.name}")
            if path.suffix == ".safetensors" and not _header(path):
                raise ValueError(f"{path.name} holds no weights")
    except (OSError, ValueError) as error:
        raise ModelFolderError(folder, str(error), fix) from error


def safetensors_header(path: Path) -> dict[str, Any]:
    """Entry by tensor name. Raises OSError, and ValueError where the file is cut or no safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{size} bytes are no safetensors file")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(size - 8, LONGEST_HEADER_BYTES):
            raise ValueError(f"its header should have {header_bytes} bytes, the file has {size}")
        try:
            header = json.loads(stream.read(header_bytes))
        except RecursionError as error:
            raise ValueError("its header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    header.pop("__metadata__", None)
    end = 8 + header_bytes + max((_end(entry) for entry in header.values()), default=0)
    if end != size:
        raise ValueError(f"it should have {end} bytes and has {size}")
    return header


def _header(path: Path) -> dict[str, Any]:
    try:
        return safetensors_header(path)
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def _end(entry: Any) -> int:
    match entry:
        case {"data_offsets": [int(), int(end)]}:
            return end
    raise ValueError("its header is not that of a safetensors file")


def _weight_files(folder: Path) -> list[Path]:
    """Of the formats that transformers reads, in the order of its preference."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        pickled = sorted(folder.glob("pytorch_model*.bin"))
        return pickled if pickled and not whole.exists() else [whole]
    parts = _json_object(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise ValueError(f"{index.name} has no weight_map")
    return [folder / part for part in sorted(set(parts.values()))]


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"has no {path.name}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return found
