"""The ways that a server on a CPU gets its weights: each is right, and nothing is left of a process group."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from gyre.cell.engine import EngineFault, SamplingParams, Weights
from tests.cell.engine.calls import generate, prompt
from tests.sglang.conftest import SglangCase

MakeCase = Callable[..., SglangCase]


@pytest.mark.parametrize("way", ["disk", "distributed"])
async def test_weights_come_whole_and_leave_nothing(way: str, make_case: MakeCase) -> None:
    case = make_case("llama", weights_by=way)
    engine = await case.awake()
    before: tuple[int, int] | None = None
    took_s: list[float] = []
    for version in range(1, 11):
        began_s = time.monotonic()
        await engine.update(case.weights(version % 2, version=version))
        took_s.append(time.monotonic() - began_s)
        got = await generate(engine, prompt(12), SamplingParams(temperature=0.0, max_new_tokens=8))
        assert got.token_ids == case.greedy(prompt(12), 8, seed=version % 2)
        assert set(got.versions) == {version}
        now = (len(os.listdir("/proc/self/fd")), threading.active_count())
        before = before or now
        assert now <= (before[0] + 2, before[1] + 2)
    print(f"update by {way}: median {sorted(took_s)[5] * 1000:.0f} ms")
    assert not torch.distributed.is_initialized()


class Cut:
    """Weights of which one lacks a row."""

    def __init__(self, weights: Weights) -> None:
        self.version = weights.version
        self._weights = weights

    @contextmanager
    def open(self) -> Iterator[Mapping[str, torch.Tensor]]:
        with self._weights.open() as tensors:
            yield {name: tensor[:-1] if "embed" in name else tensor for name, tensor in tensors.items()}


async def test_weights_of_another_shape_are_a_fault(make_case: MakeCase) -> None:
    """Of which SGLang dies: it takes them once more for the ones that it had."""
    case = make_case("llama")
    engine = await case.awake()
    with pytest.raises(EngineFault, match="update_weights_from_disk"):
        await engine.update(Cut(case.weights(1)))
    assert engine.version is None
