"""With `batch_invariant` logits are the same bit for bit, however calls are batched and cut into passes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gyre.cell.engine import GenerateRequest, SamplingParams
from gyre.cell.engine.blocks import BlockPool
from gyre.cell.engine.invariant import (
    InvariantLinear,
    InvariantScores,
    NotInvariant,
    RowCounts,
    check_invariant,
    steady_silu,
)
from gyre.cell.engine.native import NativeEngine
from gyre.cell.engine.runner import Runner
from gyre.cell.engine.scheduler import Scheduler
from gyre.cell.engine.sequence import Sequence as Call
from tests.cell.engine.calls import generate, prompt
from tests.cell.engine.conftest import DEVICE, VOCAB, ModelWeights, reference_model, tiny_model

BLOCK = 8
# A GPU's flash attention takes no float32.
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cpu" else [torch.bfloat16]
ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="the mode wants bfloat16 on a GPU")
Logits = dict[tuple[int, int], torch.Tensor]
"""Of the token after the first n of a call, by (call, n)."""


def awake(kind: str, dtype: torch.dtype, blocks: int) -> Runner:
    runner = Runner(tiny_model(kind, 1).to(DEVICE, dtype), blocks, BLOCK, 512, batch_invariant=True)
    runner.take_weights(ModelWeights(0, reference_model(kind, 0), bool))
    runner.take_kv()
    return runner


def call(number: int, tokens: Sequence[int], prompt_tokens: int, new_tokens: int) -> Call:
    sampling = SamplingParams(seed=number, temperature=1.3, max_new_tokens=new_tokens)
    request = GenerateRequest(
        call=str(number),
        session="s",
        prompt_ids=tuple(tokens),
        prompt_tokens=prompt_tokens,
        sampling=sampling,
    )
    return Call(request, list(tokens), prompt_tokens + new_tokens, frozenset(), 0.0)


def computed(runner: Runner, calls: Sequence[Call], blocks: int, max_batch: int, step_tokens: int) -> Logits:
    """Runs the calls to their ends through one pool."""
    scheduler = Scheduler(BlockPool(blocks, BLOCK), max_batch, step_tokens)
    found: Logits = {}
    rows: list[torch.Tensor] = []
    decoder = runner._decoder
    compute = decoder.logits
    decoder.logits = lambda hidden: rows.append(compute(hidden)) or rows[-1]  # type: ignore[method-assign,func-returns-value]
    for one in calls:
        scheduler.add(one)
    while scheduler.has_work:
        rows.clear()
        spans = scheduler.plan()
        drawn = runner.run(spans)
        scheduler.advance(spans)
        for row, (span, token, logprob) in enumerate(drawn):
            one = span.sequence
            found[int(one.request.call), len(one.tokens)] = rows[0][row].cpu()
            one.append(token, logprob, 0)
            if one.finish_reason is not None:
                scheduler.remove(one)
    decoder.logits = compute  # type: ignore[method-assign]
    return found


def asked(draw: random.Random) -> list[tuple[int, ...]]:
    """Prompts of many lengths; some start alike, so that a prefix is found."""
    shared = [draw.randrange(VOCAB) for _ in range(40)]
    prompts = []
    for _ in range(7):
        own = [draw.randrange(VOCAB) for _ in range(draw.choice((1, 2, 7, 8, 9, 30, 150)))]
        prompts.append(tuple(shared[: draw.choice((0, 0, 17, 40))] + own))
    return prompts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_do_not_depend_on_the_batch_or_on_the_cuts(kind: str, dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    prompts = asked(draw)
    runner = awake(kind, dtype, 256)
    want: Logits = {}
    outputs: list[list[int]] = []
    for number, ids in enumerate(prompts):
        one = call(number, ids, len(ids), 20)
        want |= computed(runner, [one], 256, max_batch=1, step_tokens=4096)
        outputs.append(one.tokens)
    for _ in range(4):
        # Some go on from tokens that were sampled elsewhere; some pools are so small that calls give way.
        again = []
        for number in draw.sample(range(len(prompts)), draw.randrange(1, 8)):
            ids = prompts[number]
            keep = draw.choice((0, 0, 1, 9, 19))
            again.append(call(number, outputs[number][: len(ids) + keep], len(ids), 20))
        blocks = draw.choice((32, 64, 256))
        step_tokens = draw.choice((3, 17, 64, 512))
        got = computed(runner, again, blocks, max_batch=draw.choice((2, 5, 16)), step_tokens=step_tokens)
        assert {number for number, _ in got} == {int(one.request.call) for one in again}
        for place, logits in got.items():
            assert torch.equal(logits, want[place]), place
        assert all(one.tokens == outputs[int(one.request.call)] for one in again)


@ON_CPU
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_are_those_of_transformers(kind: str) -> None:
    runner = awake(kind, torch.float32, 64)
    one = call(0, [random.Random(3).randrange(VOCAB) for _ in range(150)], 150, 10)
    got = computed(runner, [one], 64, max_batch=1, step_tokens=100)
    with torch.inference_mode():
        want = reference_model(kind, 0)(input_ids=torch.tensor([one.tokens])).logits[0]
    for (_, length), logits in got.items():
        assert torch.allclose(logits, want[length - 1], atol=3e-4, rtol=1e-4)


@ON_CPU
async def test_an_engine_answers_alike_under_load_and_alone(native: Any) -> None:
    async def answers(engine: NativeEngine, numbers: Sequence[int]) -> list[tuple[Any, ...]]:
        sampling = [SamplingParams(seed=i, max_new_tokens=12, top_p=0.9) for i in numbers]
        got = await asyncio.gather(
            *(
                generate(engine, prompt(5 + 20 * i, i), one, call=f"c{i}")
                for i, one in zip(numbers, sampling, strict=True)
            )
        )
        return [(chunk.token_ids, chunk.logprobs) for chunk in got]

    busy = await native.awake(batch_invariant=True, step_tokens=30)
    idle = await native.awake(batch_invariant=True)
    assert await answers(busy, range(6)) == [(await answers(idle, [i]))[0] for i in range(6)]


def test_float32_on_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        check_invariant(torch.float32, torch.device("cuda"))
    check_invariant(torch.bfloat16, torch.device("cuda"))
    check_invariant(torch.float32, torch.device("cpu"))


def test_counts_of_rows_that_add_up_otherwise_are_not_used() -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1, keepdim=True) + (1.0 if len(x) in (8, 256) else 0.0)

    rows = RowCounts()
    rows.keep(product, torch.randn(512, 3), 16)
    assert rows.counts == (4, 16, 32, 64, 128, 512)
    assert list(rows.cuts(5)) == [(0, 16)]
    assert list(rows.cuts(64)) == [(0, 64)]
    assert list(rows.cuts(150)) == [(0, 128), (128, 160)]
    assert list(rows.cuts(1100))[:2] == [(0, 512), (512, 1024)]


def test_a_product_whose_rows_depend_on_their_place_is_refused() -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(len(x))[:, None]

    with pytest.raises(NotInvariant, match="place"):
        RowCounts().keep(product, torch.randn(512, 3), 16)


@pytest.mark.parametrize("rows", [1, 4, 5, 31, 100, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_product_is_the_same_among_any(rows: int, dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(rows)
    weight = torch.randn(50, 96, generator=numbers).to(dtype)
    bias = torch.randn(50, generator=numbers).to(dtype)
    x = torch.randn(rows, 96, generator=numbers).to(dtype)
    linear = InvariantLinear(dtype, torch.device("cpu"))
    linear.check([weight])
    whole = linear(x, weight, bias)
    assert whole.shape == (rows, 50)
    assert torch.allclose(whole.float(), F.linear(x, weight, bias).float(), rtol=2e-2, atol=0.1)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(linear(x[row : row + 1], weight, bias)[0], whole[row])


@pytest.mark.parametrize("width", [33, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_silu_of_a_row_is_the_same_among_any(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(101, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)[:, :width]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        whole = steady_silu(x)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(whole.float(), F.silu(x).float(), rtol=1e-2)
    for row in range(0, 101, 10):
        assert torch.equal(steady_silu(x[row : row + 1])[0], whole[row])


def test_scores_of_a_row_are_the_same_among_any_and_with_more_hidden_tiles() -> None:
    scores = InvariantScores(head_dim=16, block_tokens=8)
    scores.check()
    tile = scores.tile_tokens
    numbers = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2, 64, 16, generator=numbers)
    keys, values = torch.randn(2, 3, 2, 4, tile, 16, generator=numbers)
    positions = torch.randint(0, 2 * tile, (3, 64), generator=numbers)
    hidden = (torch.arange(4 * tile).view(4, 1, tile) > positions[:, None, :, None])[:, None]
    whole = scores(query, keys, values, hidden)
    mask = ~hidden.transpose(2, 3).reshape(3, 1, 64, -1)
    flat = (part.reshape(3, 2, -1, 16) for part in (keys, values))
    assert torch.allclose(whole, F.scaled_dot_product_attention(query, *flat, attn_mask=mask), atol=1e-5)
    rows = scores.padded(3)
    alone = scores(query[1:2, :, :rows], keys[1:2, :, :2], values[1:2, :, :2], hidden[1:2, :, :2, :rows])
    assert torch.equal(alone[0], whole[1, :, :rows])
