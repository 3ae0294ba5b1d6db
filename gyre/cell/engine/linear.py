"""Products of activations and weights, as the device computes them best."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(rows [n, in], weight [out, in], bias [out] or None) -> [n, out] in the weight's dtype."""

_TILE_ELEMENTS = 1 << 20
_FEW_ROWS = 4


def pick_linear(dtype: torch.dtype, device: torch.device) -> Linear:
    """The fastest for weights of that kind."""
    if widens(dtype, device):
        return WidenedLinear()
    return F.linear


def widens(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies such numbers faster as float32: a CPU without instructions for them."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if dtype is torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not torch.ops.mkldnn._is_mkldnn_fp16_supported()


class Widener:
    """Float32 copies of tiles of weights, one after the other in the same memory: to ask the system for new
    memory each time can take as long as the product."""

    def __init__(self) -> None:
        self._memory = torch.empty(_TILE_ELEMENTS)

    def __call__(self, tile: torch.Tensor) -> torch.Tensor:
        """Valid until the next call."""
        if tile.numel() > self._memory.numel():
            return tile.float()
        return self._memory[: tile.numel()].view(tile.shape).copy_(tile)


class WidenedLinear:
    """A `Linear` in float32, the weight converted in tiles that fit a cache; the result is rounded once."""

    def __init__(self) -> None:
        self._widened = Widener()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] < _FEW_ROWS:
            # Bound by reading the weight, which torch does well for so few rows.
            return F.linear(x, weight, bias)
        wide = x.float()
        parts = [torch.mm(wide, self._widened(tile).t()) for tile in weight_tiles(weight)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if bias is not None:
            out += bias
        return out.to(weight.dtype)


def weight_tiles(weight: torch.Tensor) -> list[torch.Tensor]:
    """Rows of a weight [out, in] that fit a cache when they are widened, part after part."""
    rows = max(_TILE_ELEMENTS // weight.shape[1], 1)
    return [weight[start : start + rows] for start in range(0, len(weight), rows)]
