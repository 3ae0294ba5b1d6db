"""What the core's ranks put into a checkpoint: a Hugging Face folder and each rank's optimizer shard."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from gyre.cell.checkpoints import CheckpointError
from gyre.cell.train.optimizer import MasterWeights

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
)


def save_weights(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor], tokenizer: Path) -> None:
    """`weights` whole, by the names of `model`, which itself may hold none; config and tokenizer beside."""
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def save_optimizer(folder: Path, masters: MasterWeights, rank: int) -> None:
    """This rank's master weights and moments."""
    save_file({name: t.cpu().contiguous() for name, t in masters.state().items()}, _shard(folder, rank))


def load_optimizer(folder: Path, masters: MasterWeights, rank: int) -> None:
    """Raises CheckpointError where the shard is of another layout."""
    try:
        masters.load_state(load_file(_shard(folder, rank)))
    except (OSError, KeyError, RuntimeError) as error:
        reason = f"rank {rank} finds no optimizer shard of its layout: {error}"
        raise CheckpointError(folder, reason) from error


def _shard(folder: Path, rank: int) -> Path:
    return folder / f"optimizer-{rank}.safetensors"
