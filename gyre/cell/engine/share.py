"""What one of several ranks computes of a model: which heads, which part of each MLP, with which weights."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from gyre.cell.engine.base import divides
from gyre.cell.engine.decoder import check_model
from gyre.cell.weights import fill

_OVER_HEADS = ("q_proj",)
_OVER_KV_HEADS = ("k_proj", "v_proj")
_OVER_MLP = ("gate_proj", "up_proj")
_SUMMED = ("o_proj", "down_proj")


def check_share(config: PretrainedConfig, ranks: int) -> None:
    """Raises ValueError for a model that cannot be divided so."""
    heads, kv_heads = _heads(config)
    if not divides(heads, kv_heads, ranks):
        raise ValueError(
            f"{heads} heads and {kv_heads} KV heads cannot be divided among {ranks} ranks: heads must be a"
            " multiple of the ranks, and so must KV heads, or the ranks a multiple of them"
        )


def _heads(config: Any) -> tuple[int, int]:
    heads: int = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


class Share(NamedTuple):
    """Rank `rank` of `ranks`. Where there are more ranks than KV heads, several have the same one."""

    rank: int = 0
    ranks: int = 1

    def heads(self, config: PretrainedConfig) -> tuple[int, int]:
        heads = _heads(config)[0]
        return self.rank * heads // self.ranks, (self.rank + 1) * heads // self.ranks

    def kv_heads(self, config: PretrainedConfig) -> tuple[int, int]:
        heads = _heads(config)[1]
        first = self.rank * heads // self.ranks
        return first, max((self.rank + 1) * heads // self.ranks, first + 1)

    def mlp(self, config: Any) -> tuple[int, int]:
        width: int = config.intermediate_size
        return self.rank * width // self.ranks, (self.rank + 1) * width // self.ranks

    def vocab(self, config: Any) -> tuple[int, int]:
        """The tokens whose logits it computes."""
        size: int = config.vocab_size
        return self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks

    @torch.no_grad()
    def model(self, whole: PreTrainedModel) -> PreTrainedModel:
        """A module of this rank's shapes on the same device, its weights undefined. `whole` itself for a rank
        alone. Raises ValueError."""
        if self.ranks == 1:
            return whole
        check_model(whole)
        check_share(whole.config, self.ranks)
        config: Any = copy.deepcopy(whole.config)
        heads, kv_heads, mlp = (span(whole.config) for span in (self.heads, self.kv_heads, self.mlp))
        config.head_dim = _head_dim(whole.config)
        config.num_attention_heads = heads[1] - heads[0]
        config.num_key_value_heads = kv_heads[1] - kv_heads[0]
        config.intermediate_size = mlp[1] - mlp[0]
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=whole.dtype)
        model.to_empty(device=whole.device)
        model.tie_weights()
        if model.lm_head.weight is not model.model.embed_tokens.weight:
            rows = self.vocab(whole.config)
            model.lm_head.weight = nn.Parameter(model.lm_head.weight[: rows[1] - rows[0]].clone())
        for (_, buffer), (_, source) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
            buffer.copy_(source)
        share: PreTrainedModel = model.eval()
        return share

    def fill(self, model: nn.Module, config: PretrainedConfig, weights: Any) -> None:
        """Copies this rank's part of whole `weights`, by name, of a model of `config`."""
        named = dict(model.named_parameters())
        fill(named.values(), (self._part(name, config, weights[name], named[name].device) for name in named))

    def _part(
        self, name: str, config: PretrainedConfig, weight: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        *_, module, kind = name.split(".")
        if self.ranks == 1:
            return weight
        if module in _OVER_HEADS + _OVER_KV_HEADS:
            heads = self.heads(config) if module in _OVER_HEADS else self.kv_heads(config)
            size = _head_dim(config)
            return weight[heads[0] * size : heads[1] * size]
        if module == "lm_head":
            return weight[slice(*self.vocab(config))]
        if module in _OVER_MLP:
            return weight[slice(*self.mlp(config))]
        if module not in _SUMMED:
            return weight
        if kind == "bias":
            # Added once.
            return weight if self.rank == 0 else torch.zeros_like(weight)
        size = _head_dim(config)
        heads = self.heads(config)
        columns = (heads[0] * size, heads[1] * size) if module == "o_proj" else self.mlp(config)
        # Columns are picked where they go: in host memory that would be a copy of its own, and not pinned.
        return weight.to(device, non_blocking=True)[:, slice(*columns)]


ALONE = Share()


def _head_dim(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size
