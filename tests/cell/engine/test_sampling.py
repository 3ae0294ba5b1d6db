from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cell.engine import SamplingParams
from gyre.cell.engine.draws import uniform
from gyre.cell.engine.sampling import sample


def frequencies(logits: torch.Tensor, params: SamplingParams, draws: int = 4000) -> torch.Tensor:
    tokens, _ = sample(logits.expand(draws, -1), [params] * draws, range(draws))
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / draws


def test_a_number_depends_on_seed_and_position_alone() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(seed, at) for seed in range(-50, 50) for at in range(100)}) == 10_000


def test_numbers_never_change() -> None:
    # A job that is resumed under a newer release continues its calls.
    got = [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(2**63, 5)]
    assert got == [0.8833108082136398, 0.43152799704850864, 0.7497482413580272, 0.1254141737652148]


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_numbers_are_uniform_along_seeds_and_positions(axis: str) -> None:
    numbers = torch.tensor(
        [uniform(i, 7) if axis == "seed" else uniform(7, i) for i in range(20_000)], dtype=torch.float64
    )
    counts = torch.histc(numbers, bins=20, min=0.0, max=1.0)
    assert (counts - 1000).abs().max() < 150
    pairs = torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))
    assert abs(float(pairs[0, 1])) < 0.03


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -50.0])
    got = frequencies(logits, SamplingParams(temperature=1.5))
    assert torch.allclose(got, (logits / 1.5).softmax(-1), atol=0.03)
    assert got[4] == 0


def test_top_k_and_top_p_renormalise_what_they_keep() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    probs = logits.softmax(-1)
    kept = frequencies(logits, SamplingParams(top_k=2))
    want = torch.tensor([0.0, probs[1], probs[2], 0.0]) / (probs[1] + probs[2])
    assert torch.allclose(kept, want, atol=0.03)
    # 0.64 + 0.24 reach 0.8; of the two kept by top-k, 0.73 alone reach 0.7.
    assert frequencies(logits, SamplingParams(top_p=0.8)).nonzero().flatten().tolist() == [1, 2]
    assert frequencies(logits, SamplingParams(top_k=2, top_p=0.7)).nonzero().flatten().tolist() == [1]


def test_of_equals_top_k_keeps_exactly_k() -> None:
    assert (frequencies(torch.zeros(6), SamplingParams(top_k=2)) > 0).sum() == 2


def test_log_probabilities_are_before_filters() -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(temperature=0.5, top_k=1),
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.3),
    ]
    tokens, logprobs = sample(logits, params, [0, 0, 0])
    scaled = logits / torch.tensor([[0.5], [1.0], [1.0]])
    want = scaled.log_softmax(-1)[torch.arange(3), torch.tensor(tokens)]
    assert logprobs == pytest.approx(want.tolist(), abs=1e-6)
    assert tokens[:2] == logits[:2].argmax(-1).tolist()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.01, 0.5, 0.99, 1.0]),
    seed=st.integers(-(2**63), 2**64),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(PARAMS, st.integers(0, 10_000)), min_size=1, max_size=6), st.integers(0, 100))
def test_a_row_does_not_depend_on_its_neighbours(rows: list[tuple[SamplingParams, int]], seed: int) -> None:
    logits = 4 * torch.randn(len(rows), 9, generator=torch.Generator().manual_seed(seed))
    together = sample(logits, [params for params, _ in rows], [at for _, at in rows])
    alone = [sample(logits[i : i + 1], [params], [at]) for i, (params, at) in enumerate(rows)]
    assert together[0] == [tokens[0] for tokens, _ in alone]
    assert together[1] == pytest.approx([logprobs[0] for _, logprobs in alone], abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(PARAMS, st.integers(0, 10_000))
def test_a_token_that_is_filtered_is_never_drawn(params: SamplingParams, position: int) -> None:
    logits = torch.tensor([[5.0, -float("inf"), 5.0, -1.0, -float("inf")]])
    tokens, logprobs = sample(logits, [params], [position])
    assert tokens[0] in (0, 2, 3)
    assert logprobs[0] > -100
