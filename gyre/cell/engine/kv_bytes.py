"""Blocks of a block-major pool [blocks, layers, 2, block_tokens, kv_heads, head_dim] as bytes, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b

import torch
from transformers import PretrainedConfig

from gyre.cell.engine.base import KvLayout

# What a configuration says of the file it was read from, not of the model.
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def model_key(config: PretrainedConfig) -> str:
    """The same wherever the same model was loaded from."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{config.model_type}-{blake2b(text.encode(), digest_size=8).hexdigest()}"


def layout_of(data: torch.Tensor, model: str, version: int, heads: int) -> KvLayout:
    """Of one block of a model of so many KV heads, of which `data` may hold a part."""
    _, layers, _, block_tokens, _, head_dim = data.shape
    return KvLayout(
        model=model,
        adapter="",
        version=version,
        dtype=str(data.dtype).removeprefix("torch."),
        layers=layers,
        block_tokens=block_tokens,
        kv_heads=heads,
        head_dim=head_dim,
    )


def read_blocks(data: torch.Tensor, blocks: Sequence[int], into: memoryview) -> None:
    """Copies blocks, one after the other; on the CPU without a copy in between."""
    index = torch.tensor(blocks, device=data.device)
    target = _view(data, into, data.shape[4])
    if data.device.type == "cpu":
        torch.index_select(data, 0, index, out=target)
    else:
        target.copy_(data.index_select(0, index))


def write_blocks(
    data: torch.Tensor,
    blocks: Sequence[int],
    held: tuple[int, int],
    heads: tuple[int, int],
    source: memoryview,
    first: int,
) -> bool:
    """Fills blocks of `data`, which holds heads [held[0], held[1]), from those of `source`, from its block
    `first` on, which has [heads[0], heads[1]). False, and nothing is written, where a number there is not
    finite."""
    start, stop = max(held[0], heads[0]), min(held[1], heads[1])
    if start >= stop:
        return True
    found = _view(data, source, heads[1] - heads[0])[first : first + len(blocks)]
    found = found[..., start - heads[0] : stop - heads[0], :].to(data.device)
    # What is not finite makes one of both so, and they are one pass over the numbers.
    if not all(bool(extreme.isfinite()) for extreme in torch.aminmax(found)):
        return False
    target = data[..., start - held[0] : stop - held[0], :]
    target.index_copy_(0, torch.tensor(blocks, device=data.device), found)
    return True


def _view(data: torch.Tensor, buffer: memoryview, heads: int) -> torch.Tensor:
    _, layers, halves, block_tokens, _, head_dim = data.shape
    return torch.frombuffer(buffer, dtype=data.dtype).view(-1, layers, halves, block_tokens, heads, head_dim)
