"""What a job will take, before anything is built: cells, ranks, memory, executions. No torch, no GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec

from gyre.cell.model_folder import safetensors_header
from gyre.job.tables import Job

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What memory depends on. `kv_values_per_token` counts numbers, not bytes."""

    parameters: int
    kv_values_per_token: int


class RoleMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one cell in one role, all its ranks together, activations not counted."""

    role: str
    weights_bytes: int
    kv_bytes: int = 0
    gradients_bytes: int = 0
    master_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.gradients_bytes + self.master_bytes


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`dispatched_groups` is Q_b = (phi + mu) * B, and `leave_at` the unfinished executions at which the
    core may leave rollout while all cells are in it. `parameters` is None, and `memory` empty, where the
    model is not built yet."""

    cells: int
    ranks: int
    steps: int
    bursts: int
    executions_per_step: int
    executions: int
    evaluations: int
    evaluation_executions: int
    dispatched_groups: int
    dispatched_executions: int
    capacity_executions: int
    leave_at: int
    parameters: int | None
    memory: tuple[RoleMemory, ...]


def plan(job: Job) -> Plan:
    """Pure but for reading the headers of the model's files."""
    cells, train, burst = job.cells, job.train, job.schedule.burst_steps
    groups = (job.schedule.lead_steps + burst) * train.groups_per_step
    every = job.eval.every_steps
    evaluations = 1 + math.ceil(train.steps / every) if every else 0
    shape = None if job.model.path is None else model_shape(job.model.path)
    return Plan(
        cells=cells.cells,
        ranks=cells.cells * cells.ranks,
        steps=train.steps,
        bursts=math.ceil(train.steps / burst),
        executions_per_step=train.groups_per_step * train.group_size,
        executions=train.steps * train.groups_per_step * train.group_size,
        evaluations=evaluations,
        evaluation_executions=evaluations * job.eval.count * job.eval.runs,
        dispatched_groups=groups,
        dispatched_executions=groups * train.group_size,
        capacity_executions=cells.cells * cells.capacity_executions,
        leave_at=(cells.cells - 1) * cells.capacity_executions,
        parameters=None if shape is None else shape.parameters,
        memory=() if shape is None else _memory(job, shape),
    )


def _memory(job: Job, shape: ModelShape) -> tuple[RoleMemory, ...]:
    value_bytes = _DTYPE_BYTES[job.model.dtype]
    weights = shape.parameters * value_bytes
    engines = job.cells.ranks if job.rollout.parallel == "data" else 1
    held = engines * weights
    kv = engines * job.rollout.kv_tokens * shape.kv_values_per_token * value_bytes
    gradients = shape.parameters * 4
    # fp32 master weights and AdamW's two moments; they stay on the core in either role.
    master = shape.parameters * 12
    return (
        RoleMemory(role="core, rollout", weights_bytes=held, kv_bytes=kv, master_bytes=master),
        RoleMemory(role="core, train", weights_bytes=weights, gradients_bytes=gradients, master_bytes=master),
        RoleMemory(role="satellite, rollout", weights_bytes=held, kv_bytes=kv),
        RoleMemory(role="satellite, train", weights_bytes=weights, gradients_bytes=gradients),
    )


def model_shape(folder: Path) -> ModelShape | None:
    """From config.json and the headers of the safetensors files; None where they do not tell."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        config = config.get("text_config", config)
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        kv_values = 2 * config["num_hidden_layers"] * kv_heads * head_dim
        parameters = sum(_parameters(file) for file in sorted(folder.glob("*.safetensors")))
        return ModelShape(parameters=parameters, kv_values_per_token=kv_values) if parameters else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None


def _parameters(file: Path) -> int:
    return sum(math.prod(entry["shape"]) for entry in safetensors_header(file).values())
