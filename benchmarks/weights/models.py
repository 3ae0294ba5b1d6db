"""Weights in the shapes of known models, of Llama's kind, embeddings tied."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gyre.cell.weights import Layout

DTYPE = torch.bfloat16


class Shape(NamedTuple):
    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def parameters(self) -> list[tuple[int, ...]]:
        """In the module's order."""
        hidden, mlp = self.hidden, self.mlp
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention: list[tuple[int, ...]] = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
        layer = [*attention, (mlp, hidden), (mlp, hidden), (hidden, mlp), (hidden,), (hidden,)]
        return [(self.vocab, hidden), *(layer * self.layers), (hidden,)]

    def config(self) -> dict[str, Any]:
        """For transformers' LlamaConfig."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        }


# SmolLM2-135M, Llama-3.2-1B, Qwen2.5-3B, and one for a check of the benchmark itself.
SHAPES = {
    "tiny": Shape(512, 64, 128, 2, 2, 1, 32),
    "0.135B": Shape(49152, 576, 1536, 30, 9, 3, 64),
    "1B": Shape(128256, 2048, 8192, 16, 32, 8, 64),
    "3B": Shape(151936, 2048, 11008, 36, 16, 2, 128),
}


# Of these, on the CPU, layers share their numbers: three copies would not fit beside the snapshots.
LARGE = ("3B",)


def layout_of(size: str) -> Layout:
    return Layout(SHAPES[size].parameters(), DTYPE, 0, 1)


def tensors(
    layout: Layout, dtype: torch.dtype, device: torch.device, *, shared: bool = False
) -> list[Tensor]:
    """Of the layout's shapes, all numbers alike: who copies does not look at them. With `shared` those of one
    shape, which are of different layers, are the same: less memory, and still too much for a cache."""
    made: list[Tensor] = []
    by_shape: dict[tuple[int, ...], Tensor] = {}
    for slot in layout.slots:
        tensor = by_shape.get(slot.shape) if shared else None
        if tensor is None:
            tensor = by_shape[slot.shape] = torch.full(slot.shape, 0.02, dtype=dtype, device=device)
        made.append(tensor)
    return made
