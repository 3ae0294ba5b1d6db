"""The job file's tables about models, cells, rollout and training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class WarmStartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised training on demonstrations before step 0, on the core. `demos` names a function
    `package.module:function` or `file.py:function` that yields conversations."""

    demos: str
    steps: int = 100
    batch: int = 16
    lr: float = 1e-3


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy: a folder that `AutoModelForCausalLM` reads, or a function that writes one, once,
    into the cache."""

    path: Path | None = None
    recipe: str | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    context_tokens: int = 2048
    warm_start: WarmStartConfig | None = None


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where ranks run. With `listen` machines may join by `gyre join`, which is to hold the same
    `token_file`; satellites wait until `nodes` have joined."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: int = 1
    listen: str | None = None
    token_file: Path | None = None
    nodes: int = 0


class CellsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """K equal, independently switchable units; cell 0 is the core."""

    cells: int = 3
    ranks: int = 1
    capacity_executions: int = 8
    group_timeout_s: float = 60.0


class SglangConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell's SGLang server: one that runs already at `server_url`, in which `{cell}` and `{rank}` are
    replaced, or one that the cell starts with `python`, the interpreter of the environment SGLang is in (by
    default our own)."""

    server_url: str | None = None
    python: Path | None = None
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    start_timeout_s: float = 600.0
    mem_fraction_static: float = 0.5
    memory_saver: bool = True
    weights_by: Literal["auto", "ipc", "distributed", "disk"] = "auto"
    kv_storage_bytes: int = 0


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine of a cell in rollout role: one a rank with `parallel` "data", one over all its ranks with
    "tensor". `on_publish` says what new weights do with KV of the older ones. While its cell trains an engine
    keeps up to `kv_rest_bytes` of idle sessions' KV in host memory."""

    engine: Literal["native", "sglang"] = "native"
    parallel: Literal["data", "tensor"] = "data"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    kv_tokens: int = 16384
    block_tokens: int = 16
    max_batch: int = 16
    chunk_interval_s: float = 0.05
    batch_invariant: bool = False
    on_publish: Literal["recompute", "keep"] = "recompute"
    kv_rest_bytes: int = 0
    sglang: SglangConfig = SglangConfig()


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The update: AdamW on fp32 master weights, which the core owns. With `lr_schedule` "linear" the rate
    falls from `lr` to 0 over `steps`."""

    steps: int = 10
    groups_per_step: int = 4
    group_size: int = 8
    lr: float = 1e-5
    warmup_steps: int = 0
    lr_schedule: Literal["constant", "linear"] = "constant"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_step_tokens: int = 8192
    lease_s: float = 120.0


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints of complete steps; the newest `keep` stay."""

    every_steps: int = 1
    keep: int = 2
