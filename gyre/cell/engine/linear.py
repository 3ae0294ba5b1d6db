"""Products of activations and weights, as the device computes them best."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(rows [n, in], weight [out, in], bias [out] or None) -> [n, out], in the weight's dtype or one as precise
as it was added up in; rows may be of either."""

_TILE_ELEMENTS = 1 << 20
# Their count is a multiple of it, where so many fit.
_TILE_ROWS = 64
_FEW_ROWS = 4
# From here on torch divides a product among threads as well as we do.
_MANY_ROWS = 512


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
    """A `Linear` in float32, the weight converted in tiles that fit a cache. Its result stays float32: the
    next product would only widen it again."""

    def __init__(self) -> None:
        self._widened = Widener()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] < _FEW_ROWS:
            # Bound by reading the weight, which torch does well for so few rows.
            return F.linear(x.to(weight.dtype), weight, bias)
        wide = x.float()
        parts = [_product(wide, self._widened(tile)) for tile in weight_tiles(weight)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if bias is not None:
            out += bias
        return out


def _product(x: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """x [rows, in] by tile [out, in]: [rows, out]. Threads take columns of their own: of few rows the product
    takes up to twice as long as torch divides it among them."""
    rows, pieces = len(x), _pieces(torch.get_num_threads())
    if pieces == 1 or rows >= _MANY_ROWS or len(tile) % pieces:
        return torch.mm(x, tile.t())
    columns = tile.view(pieces, -1, tile.shape[1]).transpose(1, 2)
    return torch.bmm(x.expand(pieces, *x.shape), columns).transpose(0, 1).reshape(rows, -1)


def _pieces(threads: int) -> int:
    """A power of two: it divides the rows of most tiles."""
    return 1 << (threads - 1).bit_length()


def weight_tiles(weight: torch.Tensor) -> list[torch.Tensor]:
    """Rows of a weight [out, in] that fit a cache when they are widened, part after part."""
    rows = max(_TILE_ELEMENTS // weight.shape[1] // _TILE_ROWS * _TILE_ROWS, 1)
    return [weight[start : start + rows] for start in range(0, len(weight), rows)]
