"""A small policy, trajectories and set-ups for tests of cells."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Literal

from gyre.cell.config import (
    CellsConfig,
    CheckpointConfig,
    ClusterConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from gyre.cell.worker_messages import CellSetup
from gyre.loss import LossConfig, MicroStep, Trajectory
from tests.proxy.tokenizer_folders import write_tokenizer

VOCAB = 401
TEMPERATURE = 0.7


def write_policy(
    folder: Path,
    *,
    tied: bool = True,
    heads: int = 3,
    kv_heads: int = 1,
    width: int = 15,
    head_dim: int = 10,
    mlp: int = 63,
) -> Path:
    """A Llama, by default one of which two ranks hold unlike parts; weights peaked enough that they matter; a
    tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width * heads,
        intermediate_size=mlp,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def cell_setup(
    model: Path,
    shm: Path,
    checkpoints: Path,
    *,
    ranks: int = 1,
    parallel: Literal["data", "tensor"] = "data",
    train: TrainConfig | None = None,
) -> CellSetup:
    """In float32 on the CPU."""
    return CellSetup(
        model_folder=model,
        shm_folder=shm,
        log_folder=checkpoints.parent / "logs",
        checkpoint_folder=checkpoints,
        model=ModelConfig(path=model, dtype="float32", context_tokens=128),
        cluster=ClusterConfig(device="cpu", threads_per_rank=1),
        cells=CellsConfig(cells=2, ranks=ranks, capacity_executions=4, group_timeout_s=20.0),
        rollout=RolloutConfig(
            parallel=parallel, temperature=TEMPERATURE, kv_tokens=1024, max_batch=4, chunk_interval_s=0.0
        ),
        train=train or TrainConfig(lr=1e-2, max_grad_norm=1.0),
        loss=LossConfig(clip_low=0.2, clip_high=0.2),
        checkpoint=CheckpointConfig(keep=2),
    )


def trajectory(
    seed: int, *, tokens: int = 12, trained: float = 0.5, advantage: float | None = None, weight: float = 0.5
) -> Trajectory:
    """Random tokens, `trained` the share of them that count, their old log-probabilities about right."""
    rng = random.Random(seed)
    trainable = [0] + [int(rng.random() < trained) for _ in range(tokens - 1)]
    old = [rng.uniform(-8.0, -2.0) if count else 0.0 for count in trainable]
    return Trajectory(
        execution=f"g000000.{seed:02d}",
        leaf=0,
        role="main",
        token_ids=struct.pack(f"<{tokens}i", *(rng.randrange(VOCAB) for _ in range(tokens))),
        trainable=bytes(trainable),
        old_logprobs=struct.pack(f"<{tokens}f", *old),
        versions=struct.pack(f"<{tokens}i", *(0 if count else -1 for count in trainable)),
        advantage=rng.uniform(-2.0, 2.0) if advantage is None else advantage,
        weight=weight,
    )


def micro_step(*trajectories: Trajectory, step: int = 0, group: int = 0, index: int = 0) -> MicroStep:
    name = f"g{group:06d}"
    return MicroStep(id=f"{step}.{name}.{index}", step=step, group=name, trajectories=trajectories)
