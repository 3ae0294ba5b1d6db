"""A model folder is looked at before anything is started."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.cell.model_folder import ModelFolderError, check_model_folder, safetensors_header


def safetensors(tensors: dict[str, int]) -> bytes:
    """A file of float32 tensors by name and length."""
    header, end = {}, 0
    for name, length in tensors.items():
        header[name] = {"dtype": "F32", "shape": [length], "data_offsets": [end, end + 4 * length]}
        end += 4 * length
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(end)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": 3, "b": 5}))
    return tmp_path


def shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    weight_map = {"a": "one.safetensors", "c": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_whole_folders_pass(folder: Path) -> None:
    check_model_folder(folder)
    shard(folder)
    (folder / "two.safetensors").write_bytes(safetensors({"c": 1}))
    check_model_folder(folder)


def test_a_folder_of_pickled_weights_is_transformers_business(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    check_model_folder(folder)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is cut": (lambda f: (f / "config.json").write_text('{"a'), "config.json is no JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json is no JSON object"),
    "config of nothing": (lambda f: (f / "config.json").write_text("{}"), "names no model_type"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged: 0 bytes are no"),
    "weights are cut": (cut, "damaged: it should have"),
    "weights of nothing": (lambda f: (f / "model.safetensors").write_bytes(safetensors({})), "no weights"),
    "a shard is missing": (shard, "has no two.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_what_to_do(folder: Path, damage: str) -> None:
    do, words = DAMAGES[damage]
    do(folder)
    with pytest.raises(ModelFolderError, match=f"{words}.*; save the model there again") as caught:
        check_model_folder(folder)
    assert str(folder) in str(caught.value)


@given(st.binary(max_size=200), st.integers(0, 80))
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes, keep: int) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for content in (data, safetensors({"a": 2})[:keep] + data, struct.pack("<Q", len(data)) + data):
        path.write_bytes(content)
        try:
            header = safetensors_header(path)
        except ValueError:
            continue
        assert isinstance(header, dict)
