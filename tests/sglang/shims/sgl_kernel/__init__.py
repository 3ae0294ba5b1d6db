"""The operators of sgl_kernel that SGLang uses for a dense model on a CPU without AMX, in torch."""

import torch

__version__ = "0.0"


def assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, width):
    """table[rows[i], starts[i]:ends[i]] = the next slots."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def pages_to_host(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """KV of whole pages, from [slot, ...] of each layer, keys before values, to [page, layer, slot, ...]."""
    layers = len(src_ptrs) // 2
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers][:, number % layers]
        target[dst_indices // page_size, dst_indices % page_size] = source[src_indices]


def pages_to_device(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """The way back, of one layer."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[:, layer_id][src_indices // page_size, src_indices % page_size]


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA or AMX kernel; the test shim has none")

    return missing


# --- murmur3 of (seed, position, column): 32-bit words in 64-bit integers ----------------------------

MASK = 0xFFFFFFFF


def _mix(hashed, word):
    word = (word * 0xCC9E2D51) & MASK
    word = ((word << 15) | (word >> 17)) & MASK
    word = (word * 0x1B873593) & MASK
    hashed = hashed ^ word
    hashed = ((hashed << 13) | (hashed >> 19)) & MASK
    return (hashed * 5 + 0xE6546B64) & MASK


def _finish(hashed):
    hashed = hashed ^ 16
    hashed = hashed ^ (hashed >> 16)
    hashed = (hashed * 0x85EBCA6B) & MASK
    hashed = hashed ^ (hashed >> 13)
    hashed = (hashed * 0xC2B2AE35) & MASK
    return hashed ^ (hashed >> 16)


def _murmur_hash32(seed, positions, columns):
    seed = seed.view(torch.int64)[:, None]
    hashed = torch.zeros_like(seed)
    words = (seed & MASK, (seed >> 32) & MASK, positions.to(torch.int64)[:, None] & MASK)
    for word in (*words, columns.to(torch.int64)[None, :] & MASK):
        hashed = _mix(hashed, word)
    return _finish(hashed).to(torch.uint32)


LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
LIBRARY.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
