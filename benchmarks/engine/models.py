"""The models that are measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from gyre.cell.model import DTYPES
from gyre.cell.recipes import model_folder

SMOLLM2 = "examples/smollm2/model.py:write_model"
QWEN3_1_7B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def smollm2() -> Path:
    """Its folder: written once, into the cache."""
    return model_folder(SMOLLM2)


def load(folder: Path | None, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model of a folder, else one of 1.7 billion random weights in the shape of Qwen3."""
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    else:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3_1_7B), dtype=DTYPES[dtype])
    return cast(PreTrainedModel, model.to(device).eval())


class ModuleWeights:
    """A module's parameters as the weights of version 0."""

    version = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @contextmanager
    def open(self) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {name: parameter.detach() for name, parameter in self._model.named_parameters()}
