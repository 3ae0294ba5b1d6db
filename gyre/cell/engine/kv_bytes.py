"""What stands in blocks of a block-major pool [blocks, layers, 2, block_tokens, kv_heads, head_dim]."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
from transformers import PretrainedConfig

from gyre.cell.engine.base import KvLayout

# Of one core.
CACHED_BYTES = 4 * 2**20
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


def finite_sums(data: torch.Tensor, blocks: Sequence[int]) -> bytes | None:
    """`sums`, or None where a number in these blocks is not finite."""
    words, numbers, parts = [], [], []
    # On a CPU what was added up as words is in the cache when it is as numbers.
    most = max(CACHED_BYTES // data[0].nbytes, 1) if data.device.type == "cpu" else len(data)
    for first, last in _runs(blocks):
        for part in torch.split(data[first:last], most):
            words.append(_words(part).sum(1, dtype=torch.int64))
            numbers.append(part.sum(dtype=_sum_dtype(data)))
            parts.append(part)
    # What is not finite makes a sum so. One look at all of them: on a GPU each waits for it.
    if not bool(torch.stack(numbers).isfinite().all()) and not all(_is_finite(part) for part in parts):
        return None
    return torch.cat(words).cpu().numpy().tobytes()


def _is_finite(numbers: torch.Tensor) -> bool:
    """Of finite ones a sum may be too large; the least and the largest one tell."""
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(numbers))


def _sum_dtype(data: torch.Tensor) -> torch.dtype:
    """A half's sum is soon too large."""
    return torch.float32 if data.dtype == torch.float16 else data.dtype


def sums(data: torch.Tensor, blocks: Sequence[int]) -> bytes:
    """Of each of these blocks: see `KvStore.sums`. Not one word of a block can change without its sum."""
    found = [_words(data[first:last]).sum(1, dtype=torch.int64) for first, last in _runs(blocks)]
    return torch.cat(found).cpu().numpy().tobytes()


def _words(blocks: torch.Tensor) -> torch.Tensor:
    whole = blocks.flatten(1)
    return whole.view(torch.int32 if whole.shape[1] * whole.itemsize % 8 else torch.int64)


def read_blocks(data: torch.Tensor, blocks: Sequence[int], target: memoryview) -> None:
    """Copies blocks to host memory, one after the other."""
    found = torch.tensor(blocks, device=data.device)
    copy = torch.frombuffer(target, dtype=data.dtype).view(-1, *data.shape[1:])
    if data.is_cuda:
        copy.copy_(data.index_select(0, found))
    else:
        torch.index_select(data, 0, found, out=copy)


def write_blocks(
    data: torch.Tensor,
    blocks: Sequence[int],
    held: tuple[int, int],
    heads: tuple[int, int],
    source: memoryview,
) -> bytes:
    """Fills blocks of `data`, which holds heads [held[0], held[1]), from `source` in host memory, which has
    [heads[0], heads[1]) of as many. Answers the sums of `source`."""
    start, stop = max(held[0], heads[0]), min(held[1], heads[1])
    _, layers, halves, block_tokens, _, head_dim = data.shape
    shape = (-1, layers, halves, block_tokens, heads[1] - heads[0], head_dim)
    found = torch.frombuffer(source, dtype=data.dtype).view(shape).to(data.device)
    target = data[..., start - held[0] : stop - held[0], :]
    part = found[..., start - heads[0] : stop - heads[0], :]
    target.index_copy_(0, torch.tensor(blocks, device=data.device), part)
    return sums(found, range(len(blocks)))


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[first, last) of those that follow one another."""
    first = last = blocks[0] if blocks else 0
    for block in blocks:
        if block != last:
            yield first, last
            first = block
        last = block + 1
    if last > first:
        yield first, last
