"""Models of the policy: one for the engine, one for training, from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(kind: str, slot: int, rank: int, ranks: int) -> torch.device:
    """The device of a rank: its GPU, else the CPU."""
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", *gpus("cuda", slot, (rank,), ranks))
    return torch.device("cpu")


def gpus(device: str, slot: int, of: Iterable[int], ranks: int) -> list[int]:
    """Those of some ranks of a cell: in order of cells and ranks of the machine, round and round. None on the
    CPU."""
    if device != "cuda":
        return []
    return [(slot * ranks + rank) % torch.cuda.device_count() for rank in of]


def use_device(device: torch.device) -> None:
    """Makes it the calling thread's own: CUDA keeps the current device per thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def load_model(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """The folder's model with its weights, on `device`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    return cast(PreTrainedModel, model.to(device).eval())


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer, by the generation config, else the model's."""
    if (folder / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(folder).eos_token_id
    else:
        found = AutoConfig.from_pretrained(folder).eos_token_id
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def training_model(like: PreTrainedModel, mesh: DeviceMesh | None) -> PreTrainedModel:
    """A module for training with memory of its own, FSDP2-sharded over `mesh`, weights undefined."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(like.config, dtype=like.dtype)
    model.to_empty(device=like.device)
    # Memory is taken module by module, which unties what was tied.
    model.tie_weights()
    for (_, buffer), (_, source) in zip(model.named_buffers(), like.named_buffers(), strict=True):
        buffer.copy_(source)
    if mesh is not None:
        _shard(model, mesh)
    return cast(PreTrainedModel, model.train())


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Every decoder layer by itself, then the rest; gradients are reduced in fp32 and summed."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for layer in max(stacks, key=len):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
