"""The forward pass of a dense Llama or Qwen shape, over the very parameters of a transformers model.

A pass of a few tokens is bound by the count of its operations as much as by their work, so the engine does
not call the module: it does what the module does, in fewer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from gyre.cell.engine.linear import Linear
from gyre.cell.engine.memory import is_released


class Ranks(Protocol):
    """The others that compute a model together with this one."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what all have."""

    def joined(self, logits: torch.Tensor) -> torch.Tensor:
        """Rank 0 gets the logits [rows, vocab] of which each has columns."""


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim]) -> [n, heads, head_dim]."""

SHAPES = ("llama", "mistral", "qwen2", "qwen3")


def check_model(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that is not computed as `Decoder` does."""
    config = model.config
    name = type(model).__name__
    windowed = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or (windowed,)) - {"full_attention"}
    if kinds:
        raise ValueError(f"{name} has {sorted(kinds)} layers: the native engine runs full attention only")
    if config.model_type not in SHAPES:
        raise ValueError(f"{name} is a {config.model_type}: the native engine runs {', '.join(SHAPES)}")
    if config.hidden_act != "silu":
        raise ValueError(f"{name} has hidden_act {config.hidden_act}: the native engine computes silu")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        # There the angle of a position depends on the longest sequence of the batch.
        raise ValueError(f"{name} has {rope} rotary positions, which depend on the batch")


class Fused:
    """Parameters of several linear maps of one input, kept side by side in memory as views of one tensor."""

    def __init__(self, linears: Sequence[Any]) -> None:
        self._weights: list[nn.Parameter] = [linear.weight for linear in linears]
        self._biases: list[nn.Parameter] = [linear.bias for linear in linears if linear.bias is not None]
        self.weight = torch.empty(0)
        self.bias: torch.Tensor | None = None

    def join(self) -> None:
        """Makes them views of one tensor, where they are not."""
        self.weight = _joined(self._weights)
        if self._biases:
            self.bias = _joined(self._biases)


def _joined(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    first = parameters[0].data
    rows = [parameter.shape[0] for parameter in parameters]
    whole = first.as_strided((sum(rows), *first.shape[1:]), first.stride()) if _together(parameters) else None
    if whole is None:
        whole = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=first.device)
        start = 0
        for parameter, count in zip(parameters, rows, strict=True):
            part = whole[start : start + count]
            part.copy_(parameter.data)
            parameter.data = part
            start += count
    return whole


def _together(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether each has memory of its own, right behind the one before."""
    at = parameters[0].data_ptr()
    storage = parameters[0].untyped_storage()
    for parameter in parameters:
        held = parameter.untyped_storage()
        if is_released(parameter) or parameter.data_ptr() != at or held.data_ptr() != storage.data_ptr():
            return False
        at += parameter.nbytes
    return True


def _alone(x: torch.Tensor) -> torch.Tensor:
    return x


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm: nn.Parameter = layer.input_layernorm.weight
        self.qkv = Fused((attention.q_proj, attention.k_proj, attention.v_proj))
        self.q_norm: nn.Parameter | None = attention.q_norm.weight if hasattr(attention, "q_norm") else None
        self.k_norm: nn.Parameter | None = attention.k_norm.weight if hasattr(attention, "k_norm") else None
        self.out = Fused((attention.o_proj,))
        self.mlp_norm: nn.Parameter = layer.post_attention_layernorm.weight
        self.gate_up = Fused((mlp.gate_proj, mlp.up_proj))
        self.down = Fused((mlp.down_proj,))

    @property
    def fused(self) -> tuple[Fused, ...]:
        return (self.qkv, self.out, self.gate_up, self.down)


class Decoder:
    """`model`, computed. Its parameters stay the model's; `attach` comes after they were given memory. For a
    rank's share of a model there are other `ranks`, and `head_rows` of the head that are its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        linear: Linear,
        window_tokens: int,
        silu: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        ranks: Ranks | None = None,
        head_rows: tuple[int, int] | None = None,
    ) -> None:
        check_model(model)
        config: Any = model.config
        base: Any = model.model
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.layers: int = config.num_hidden_layers
        self._eps: float = config.rms_norm_eps
        self._linear = linear
        self._silu = silu
        self._total = ranks.total if ranks is not None else _alone
        self._joined = ranks.joined if ranks is not None else _alone
        self._window_tokens = window_tokens
        self._embedding: nn.Parameter = base.embed_tokens.weight
        self._rotary: Any = base.rotary_emb
        self._layers = [_Layer(layer) for layer in base.layers]
        self._norm: nn.Parameter = base.norm.weight
        head: Any = model.get_output_embeddings()
        self._head: nn.Parameter = head.weight
        self._head_rows = slice(*head_rows) if head_rows is not None else slice(None)
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def attach(self) -> None:
        """Finds the parameters' memory, and lays side by side what is multiplied together."""
        for layer in self._layers:
            for fused in layer.fused:
                fused.join()
        if self._angles is None:
            weight = self._embedding
            positions = torch.arange(self._window_tokens, device=weight.device)
            cos, sin = self._rotary(weight[:1], positions[None])
            half = self.head_dim // 2
            # The rotated half is taken by swapping halves: the minus is in the sines.
            signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            self._angles = (cos[0, :, None].contiguous(), signed[:, None].contiguous())

    def detach(self) -> None:
        """Lets go of the parameters' memory."""
        for layer in self._layers:
            for fused in layer.fused:
                fused.weight = fused.weight.new_empty(0)
                fused.bias = None

    @property
    def weights(self) -> list[torch.Tensor]:
        """All that is multiplied with, as `attach` found it."""
        return [fused.weight for layer in self._layers for fused in layer.fused] + [
            self._head[self._head_rows]
        ]

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Of tokens [n] at their positions [n] in their sequences: [n, hidden], for `logits`."""
        assert self._angles is not None, "attach comes first"
        angles = (self._angles[0][positions], self._angles[1][positions])
        linear = self._linear
        x = F.embedding(ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = self._normed(x, layer.attention_norm)
            qkv = linear(normed, layer.qkv.weight, layer.qkv.bias).view(len(ids), -1, self.head_dim)
            out = attend(index, *self._split(layer, qkv, angles)).reshape(len(ids), -1)
            x = x + self._total(linear(out, layer.out.weight, layer.out.bias))
            gate, up = linear(
                self._normed(x, layer.mlp_norm), layer.gate_up.weight, layer.gate_up.bias
            ).chunk(2, dim=-1)
            x = x + self._total(linear(self._silu(gate).mul_(up), layer.down.weight, layer.down.bias))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab]; of several ranks at the first."""
        own = self._head[self._head_rows]
        return self._joined(self._linear(self._normed(hidden, self._norm), own, None))

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), self._eps)

    def _split(
        self, layer: _Layer, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values; the first two normed, if the model does so, and rotated."""
        heads, keys = self.heads, self.heads + self.kv_heads
        turned = qkv[:, :keys]
        if layer.q_norm is not None and layer.k_norm is not None:
            turned = torch.cat(
                (
                    self._normed(turned[:, :heads], layer.q_norm),
                    self._normed(turned[:, heads:], layer.k_norm),
                ),
                dim=1,
            )
        cos, sin = angles
        swapped = turned.roll(self.head_dim // 2, dims=-1)
        turned = (turned * cos).add_(swapped.mul_(sin))
        # What is attended to is what is kept.
        kept = layer.qkv.weight.dtype
        return turned[:, :heads], turned[:, heads:].to(kept), qkv[:, keys:].to(kept)
