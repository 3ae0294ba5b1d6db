"""What a CUDA graph records, computed here without one; the graphs themselves want a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from gyre.cell.engine.graphs import DecodeGraphs, decode, pack, pack_tokens, padded_blocks, padded_rows
from gyre.cell.engine.paged import PagedAttention, PagedPass
from gyre.cell.engine.runner import Runner
from gyre.cell.engine.scheduler import Span
from tests.cell.engine.conftest import ModelWeights, reference_model, tiny_model
from tests.cell.engine.test_invariant import call


def awake(device: str = "cpu") -> Runner:
    runner = Runner(tiny_model("qwen3", 1).to(device), 40, 8, 256)
    runner.take_weights(ModelWeights(0, reference_model("qwen3", 0), bool))
    runner.take_kv()
    return runner


def spans(runner: Runner) -> list[Span]:
    """The last tokens of three sequences whose prompts are in the pool."""
    found = []
    blocks = iter(range(40))
    for number, length in enumerate((5, 16, 30)):
        one = call(number, range(number, number + length), length, 20)
        one.table = [next(blocks) for _ in range(length // 8 + 1)]
        runner.run([Span(one, 0, length - 1)])
        found.append(Span(one, length - 1, 1))
    return found


def test_rows_and_blocks_are_rounded_up() -> None:
    assert [padded_rows(n) for n in (1, 2, 3, 9, 16, 17, 25, 33, 49, 65, 100, 128)] == [
        1, 2, 4, 16, 16, 24, 32, 48, 64, 96, 128, 128,
    ]  # fmt: skip
    assert [padded_blocks(n, 16) for n in (1, 4, 5, 7, 16, 17, 25)] == [4, 4, 6, 8, 16, 24, 32]
    assert [padded_blocks(n, 64) for n in (1, 2, 3, 5)] == [1, 2, 3, 6]


@torch.inference_mode()
def test_a_padded_decode_is_the_pass_itself() -> None:
    runner = awake()
    asked = spans(runner)
    kv, decoder = runner._kv, runner._decoder
    assert kv is not None
    step = PagedPass(kv, asked)
    want = decoder.logits(decoder.hidden(step.input_ids, step.positions, PagedAttention(step, decoder.heads)))
    before = kv.data.clone()
    got = decode(decoder, kv, pack(asked, kv, 4, 32))
    assert torch.allclose(got[:3], want, atol=1e-5)
    assert torch.allclose(kv.data, before, atol=1e-6)
    assert not kv.data[kv.padding_block].any()


def test_packing_the_tokens_alone_is_packing_all_while_tables_hold_still() -> None:
    runner = awake()
    asked = spans(runner)
    kv = runner._kv
    assert kv is not None
    packed = pack(asked, kv, 4, 8)
    moved = []
    for span in asked:
        span.sequence.tokens.append(7)
        moved.append(Span(span.sequence, span.start + 1, 1) if span.start % 8 != 7 else span)
    pack_tokens(moved, 8, packed)
    assert torch.equal(packed, pack(moved, kv, 4, 8))
    assert packed[0].tolist().count(7) >= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
@torch.inference_mode()
def test_a_graph_computes_what_was_recorded() -> None:
    runner = awake("cuda")
    asked = spans(runner)
    kv, decoder = runner._kv, runner._decoder
    assert kv is not None
    graphs = DecodeGraphs(decoder, kv)
    for _ in range(2):
        want = decode(decoder, kv, pack(asked, kv, 4, 32).cuda())
        assert torch.allclose(graphs.logits(asked), want[:3], atol=1e-4)
        for span in asked:
            span.sequence.tokens[-1] += 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
@torch.inference_mode()
def test_a_graph_that_is_garbage_is_not_freed_while_another_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = awake("cuda")
    asked = spans(runner)
    kv = runner._kv
    assert kv is not None
    threshold = gc.get_threshold()
    gc.set_threshold(10**6)
    garbage: list[object] = [DecodeGraphs(runner._decoder, kv)]
    garbage[0].logits(asked)  # type: ignore[attr-defined]
    garbage.append(garbage)
    held = [garbage]
    del garbage
    calls = 0

    def dropping(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            held.clear()
            gc.set_threshold(10)
            assert [[] for _ in range(1000)]
        return decode(*arguments)

    monkeypatch.setattr("gyre.cell.engine.graphs.decode", dropping)
    try:
        got = DecodeGraphs(runner._decoder, kv).logits(asked)
    finally:
        gc.set_threshold(*threshold)
    assert calls == 2
    assert torch.allclose(got, decode(runner._decoder, kv, pack(asked, kv, 4, 32).cuda())[:3], atol=1e-4)
