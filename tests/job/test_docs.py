from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from gyre.job import Job
from gyre.job.decode import key_paths

DOCUMENT = Path(__file__).parents[2] / "docs" / "job_file.md"


def documented() -> dict[str, str]:
    """Keys and their defaults, as the document's tables have them."""
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| .* \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {key: default.strip("`") for key, default in rows}


def default_of(key: str) -> str | Any:
    type_: Any = Job
    *tables, name = [part for part in key.split(".") if part != "NAME"]
    for table in tables:
        (found,) = (f.type for f in msgspec.structs.fields(type_) if f.name == table)
        structs = [t for t in (found, *getattr(found, "__args__", ())) if isinstance(t, type)]
        (type_,) = (t for t in structs if issubclass(t, msgspec.Struct))
    (field,) = (f for f in msgspec.structs.fields(type_) if f.name == name)
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return "-" if value is None else msgspec.to_builtins(value, enc_hook=str)


def test_every_key_is_documented_with_its_default() -> None:
    found = documented()
    tables = {key.rpartition(".")[0] for key in key_paths(Job)} - {
        "model.warm_start",
        "harness.proxy",
        "rollout.sglang",
        "evaluator.pytest",
        "evaluator.judge",
    }
    keys = set(key_paths(Job)) - tables
    # Said in one row: they are those of a lone evaluator.
    mixed = {key for key in keys if key.startswith("evaluator.mix.*.")}
    alone = {key.replace(".mix.*.", ".") for key in mixed} - {"evaluator.weight"}
    assert alone <= keys | tables
    keys = (keys - mixed) | {"evaluator.mix.NAME.weight"}
    assert set(found) == keys
    for key in keys - {"name", "run_dir", "harness.proxy", "rollout.sglang"}:
        default = default_of(key)
        if not isinstance(default, str):
            default = list(default) if isinstance(default, tuple) else default
            assert tomllib.loads(f"v = {found[key]}")["v"] == default, key
        else:
            assert found[key] == default, key
