from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gyre.job import Job, JobError, load_job, resolved_toml
from gyre.job.decode import key_paths


def test_defaults_are_filled_in(job_file: Path) -> None:
    job = load_job(job_file)
    assert job.name == "small"
    assert job.run_dir == Path.cwd() / "runs" / "small"
    assert job.cells.cells == 3
    assert job.harness.proxy.host == "127.0.0.1"


def test_paths_are_relative_to_the_job_file(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    job = load_job(
        job_file,
        [
            "model.warm_start.demos=recipes.py:demos",
            'harness.read_only=["data", "/usr"]',
            "rollout.sglang.python=venv/bin/python",
        ],
    )
    folder = job_file.parent
    assert job.tasks.path == folder / "tasks"
    assert job.model.recipe == f"{folder}/recipes.py:build"
    assert job.model.warm_start is not None
    assert job.model.warm_start.demos == f"{folder}/recipes.py:demos"
    assert job.harness.command == ("{python}", f"{folder}/harness.py")
    assert job.harness.read_only == (folder / "data", Path("/usr"))
    assert job.rollout.sglang.python == folder / "venv/bin/python"
    assert job.run_dir == Path("/runs/small")


def test_functions_of_packages_are_left_alone(job_file: Path) -> None:
    assert load_job(job_file, ["model.recipe=some.package:build"]).model.recipe == "some.package:build"


def test_the_working_folder_does_not_matter_to_a_resolved_job(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_job(job_file, ["harness.environment.A={job_dir}/a", "train.betas=[0.8, 0.9]"])
    resolved = tmp_path / "elsewhere" / "job.toml"
    resolved.parent.mkdir()
    resolved.write_text(resolved_toml(job))
    monkeypatch.chdir("/")
    assert load_job(resolved) == job


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.lr=0", 0.0),
        ("train.lr = 1e-3", 1e-3),
        ("model.dtype=float32", "float32"),
        ('model.dtype="float32"', "float32"),
        ("tasks.seed=7", 7),
        ("evaluator.junit=false", False),
        ("harness.environment.URL=http://x/?a=b", "http://x/?a=b"),
        ("name=x\ny=1", None),
    ],
)
def test_overrides_are_toml_or_else_text(job_file: Path, override: str, value: object) -> None:
    if value is None:
        with pytest.raises(JobError, match="found 'x\\\\ny=1'"):
            load_job(job_file, [override])
        return
    found: Any = load_job(job_file, [override])
    for name in override.partition("=")[0].strip().split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_an_empty_override_removes_the_key(job_file: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    job = load_job(job_file, ["model.recipe=", f"model.path={model}"])
    assert job.model.recipe is None
    assert job.model.path == model


def test_overrides_that_cannot_be_are_faults(job_file: Path) -> None:
    with pytest.raises(JobError) as caught:
        load_job(job_file, ["train", "model.recipe.x=1", ".=1"])
    assert [fault.key for fault in caught.value.faults] == [
        "--set train",
        "--set model.recipe.x",
        "--set .=1",
    ]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"[model]\npath = \n", "line 2, column 8"),
        (b"[model", "end of file"),
        (b'name = "\xff"', "byte 8"),
        (b"a = " + b"[" * 5000, "file"),
    ],
)
def test_corrupt_files_are_placed(job_file: Path, content: bytes, place: str) -> None:
    job_file.write_bytes(content)
    with pytest.raises(JobError) as caught:
        load_job(job_file)
    assert [fault.key for fault in caught.value.faults] == [place]
    assert str(job_file) in str(caught.value)


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        load_job(tmp_path / "none.toml")
    with pytest.raises(JobError, match="Is a directory"):
        load_job(tmp_path)


def test_all_faults_come_at_once(job_file: Path) -> None:
    overrides = [
        "cells.cels=4",
        "cells.cells=1",
        "train.steps=ten",
        "loss.clip_low=-1",
        "evaluator.command=",
        "rollout.engine=nativ",
    ]
    with pytest.raises(JobError) as caught:
        load_job(job_file, overrides)
    assert {fault.key: fault.nearest for fault in caught.value.faults} == {
        "cells.cels": "cells.cells",
        "cells.cells": None,
        "train.steps": None,
        "loss.clip_low": None,
        "evaluator.command": None,
        "rollout.engine": "native",
    }


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.datetimes()
    | st.sampled_from(["~nobody/x", "/dev/null", "x" * 300, "a.py:b", "\0", "/", "~"])
)
_KEYS = sorted({part for path in key_paths(Job) for part in path.split(".")})
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=5), inner)
    ),
    max_leaves=5,
)
_TABLES = st.dictionaries(
    st.sampled_from(sorted(Job.__struct_fields__)),
    st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=4) | _SCALARS,
    max_size=5,
)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value if v is not None] if isinstance(value, list) else value


@given(_TABLES)
@example({"model": {"path": "~nobody/x"}, "train": {"lr": float("nan"), "steps": 2**64}})
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_toml_holds_is_a_job_or_a_job_error(data: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.toml"
        path.write_text(tomli_w.dumps(_without_none(data)), encoding="utf-8", newline="")
        try:
            load_job(path)
        except JobError as error:
            assert error.faults and str(error)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=4))
@settings(max_examples=50, deadline=None)
def test_whatever_is_set_is_a_job_or_a_job_error(overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.toml"
        path.write_text("[model]\n")
        with pytest.raises(JobError):
            load_job(path, overrides)
