from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from gyre.job import load_job, plan
from gyre.job.plan import model_shape

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder of 1000 + 24 parameters, of which only headers matter."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, shape in (("a", [10, 100]), ("b", [24])):
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        header = json.dumps({"__metadata__": {"format": "pt"}, name: entry}).encode()
        (folder / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def test_counts_follow_from_the_job(job_file: Path) -> None:
    planned = plan(
        load_job(
            job_file,
            [
                "cells.cells=4",
                "cells.ranks=2",
                "cells.capacity_executions=5",
                "schedule.lead_steps=1",
                "schedule.burst_steps=2",
                "train.steps=5",
                "train.groups_per_step=3",
                "train.group_size=4",
                "eval.every_steps=2",
                "eval.recipe=recipes.py:build",
                "eval.count=6",
                "eval.runs=2",
            ],
        )
    )
    assert (planned.cells, planned.ranks) == (4, 8)
    assert (planned.steps, planned.bursts) == (5, 3)
    assert (planned.executions_per_step, planned.executions) == (12, 60)
    assert (planned.dispatched_groups, planned.dispatched_executions) == (9, 36)
    assert (planned.capacity_executions, planned.leave_at) == (20, 15)
    assert (planned.evaluations, planned.evaluation_executions) == (4, 48)
    assert planned.parameters is None
    assert planned.memory == ()


def test_memory_follows_from_the_model_folder(job_file: Path, model: Path) -> None:
    planned = plan(load_job(job_file, ["model.recipe=", f"model.path={model}", "rollout.kv_tokens=2048"]))
    assert planned.parameters == 1024
    kv = 2048 * (2 * 2 * 2 * 16) * 2
    roles = {memory.role: memory for memory in planned.memory}
    assert roles["satellite, rollout"].total_bytes == 1024 * 2 + kv
    assert roles["satellite, train"].total_bytes == 1024 * 2 + 1024 * 4
    assert roles["core, train"].total_bytes == 1024 * (2 + 4 + 12)
    assert roles["core, rollout"].total_bytes == 1024 * (2 + 12) + kv


@pytest.mark.parametrize(("parallel", "engines"), [("data", 2), ("tensor", 1)])
def test_every_engine_of_a_cell_takes_memory(
    job_file: Path, model: Path, parallel: str, engines: int
) -> None:
    overrides = ["rollout.kv_tokens=2048", "cells.ranks=2", f"rollout.parallel={parallel}"]
    planned = plan(load_job(job_file, ["model.recipe=", f"model.path={model}", *overrides]))
    roles = {memory.role: memory for memory in planned.memory}
    kv = 2048 * (2 * 2 * 2 * 16) * 2
    assert roles["satellite, rollout"].total_bytes == engines * (1024 * 2 + kv)
    assert roles["satellite, train"].total_bytes == 1024 * (2 + 4)


@pytest.mark.parametrize("broken", ["config.json", "a.safetensors"])
def test_a_model_folder_that_does_not_tell_is_unknown(model: Path, broken: str) -> None:
    (model / broken).write_bytes(b"\xff\xff\xff")
    assert model_shape(model) is None


def test_a_model_without_weights_is_unknown(model: Path) -> None:
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert model_shape(model) is None
