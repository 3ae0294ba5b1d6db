"""Giving the memory of a model's weights back and taking it again, while the module itself stays."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import nn


def release_parameters(model: nn.Module) -> None:
    """Frees the memory of all parameters. Shapes, dtypes, ties and buffers stay; what reads a weight
    meanwhile gets NaN, what writes one gets an error. Does nothing to what is released already."""
    for parameter in model.parameters():
        if not is_released(parameter):
            parameter.data = parameter.data.new_full((1,), float("nan")).expand(parameter.shape)
    return_memory(next(model.parameters()).device)


def restore_parameters(model: nn.Module) -> None:
    """Takes memory for all released parameters; their values are undefined until someone fills them."""
    for parameter in model.parameters():
        if is_released(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def is_released(parameter: torch.Tensor) -> bool:
    """Whether it has a shape only: all its elements share one place."""
    return parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size()


def return_memory(device: torch.device) -> None:
    """Hands what the allocator keeps free back to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        # glibc keeps freed blocks below 32 MiB; a cell that trains needs them now.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
