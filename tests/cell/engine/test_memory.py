from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gyre.cell.engine.memory import is_released, release_parameters, restore_parameters

PAGE_BYTES = 4096


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(1, 6), nn.Linear(6, 5), nn.BatchNorm1d(5))
    model.add_module("tied", model[1])
    return model


def test_released_weights_hold_a_shape_and_no_memory() -> None:
    model = tied()
    names = {name: (p.shape, p.dtype, id(p)) for name, p in model.named_parameters()}
    release_parameters(model)
    assert all(is_released(p) or p.numel() == 1 for p in model.parameters())
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 4 * len(names)
    assert {name: (p.shape, p.dtype, id(p)) for name, p in model.named_parameters()} == names
    assert model[2].running_var.tolist() == [1.0] * 5


def test_restored_weights_can_be_filled_trained_and_are_still_tied() -> None:
    model = tied()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    release_parameters(model)
    release_parameters(model)
    restore_parameters(model)
    model.load_state_dict(state)
    assert model[3].weight is model[1].weight
    model[1](torch.ones(2, 6)).sum().backward()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_restoring_what_is_there_changes_nothing() -> None:
    model = tied()
    before = [p.data_ptr() for p in model.parameters()]
    restore_parameters(model)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_released_weights_are_not_used_unnoticed() -> None:
    model = nn.Linear(4, 4)
    release_parameters(model)
    assert model(torch.ones(1, 4)).isnan().all()
    with torch.no_grad(), pytest.raises(RuntimeError):
        model.weight.copy_(torch.ones(4, 4))


def test_released_memory_goes_back_to_the_system() -> None:
    # Small tensors, which the allocator would keep.
    model = nn.ModuleList(nn.Linear(256, 256) for _ in range(300))
    full = resident_bytes()
    release_parameters(model)
    assert full - resident_bytes() > 60e6
    restore_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    assert abs(resident_bytes() - full) < 15e6
