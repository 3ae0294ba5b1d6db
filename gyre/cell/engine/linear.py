"""Products of activations and weights, as the device computes them best."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(rows [n, in], weight [out, in], bias [out] or None) -> [n, out] in the weight's dtype."""

_TILE_ELEMENTS = 1 << 21
_FEW_ROWS = 4


def pick_linear(dtype: torch.dtype, device: torch.device) -> Linear:
    """The fastest for weights of that kind."""
    if widens(dtype, device):
        return widened_linear
    return F.linear


def widens(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies such numbers faster as float32: a CPU without instructions for them."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if dtype is torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def widened_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In float32, the weight converted in tiles that fit a cache; the result is rounded once."""
    if x.shape[0] < _FEW_ROWS:
        # Bound by reading the weight, which torch does well for so few rows.
        return F.linear(x, weight, bias)
    wide = x.float()
    parts = [torch.mm(wide, tile.float().t()) for tile in weight_tiles(weight)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if bias is not None:
        out += bias
    return out.to(weight.dtype)


def weight_tiles(weight: torch.Tensor) -> list[torch.Tensor]:
    """Rows of a weight [out, in] that fit a cache when they are widened, part after part."""
    rows = max(_TILE_ELEMENTS // weight.shape[1], 1)
    return [weight[start : start + rows] for start in range(0, len(weight), rows)]
