"""What ranks compute together: each in a thread here."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from gyre.cell.engine.memory import is_released
from gyre.cell.engine.runner import Runner
from gyre.cell.engine.scheduler import Span
from gyre.cell.engine.share import Share, check_share
from gyre.cell.engine.sums import SocketSum
from gyre.cell.engine.team import Team, meet, wait_at_most
from tests.cell.engine.calls import prompt
from tests.cell.engine.conftest import ModelWeights
from tests.cell.engine.test_invariant import call

R = TypeVar("R")
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 63,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama with biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3, tied": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}


def on_all(ranks: int, work: Callable[[int], R]) -> list[R]:
    """At once; answers in order of the ranks."""
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(work, range(ranks)))


def met(ranks: int) -> list[Team]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "meeting.sock"

        def come(rank: int) -> Team:
            own = TCPStore("127.0.0.1", store.port, is_master=False)
            return meet(PrefixStore("a", own), rank, ranks, path, device=CPU, timeout_s=20.0)

        teams = on_all(ranks, come)
        assert not path.exists()
    return teams


def model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(1)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return made


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_shares_add_up_to_the_model(kind: str, ranks: int) -> None:
    whole = model(CONFIGS[kind])
    teams = met(ranks)
    empty = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32)
    runners = [Runner(empty, 40, 8, 128, share=Share(rank, ranks)) for rank in range(ranks)]
    ids = [prompt(length, seed=length) for length in (5, 16, 30)]

    def compute(rank: int) -> list[tuple[Span, int, float]]:
        torch.set_num_threads(1)
        runner = runners[rank]
        assert all(is_released(parameter) for parameter in runner._model.parameters())
        runner.sum = teams[rank].total
        runner.take_weights(ModelWeights(0, whole, bool))
        runner.take_kv()
        sequences = [call(number, ids[number], len(ids[number]), 20) for number in range(len(ids))]
        for number, one in enumerate(sequences):
            one.table = list(range(5 * number, 5 * number + 5))
        # Prompts but their last tokens, then those as one pass, with one prompt in two parts.
        first = [Span(one, 0, len(one.tokens) - 1) for one in sequences[:2]] + [Span(sequences[2], 0, 11)]
        then = [Span(one, len(one.tokens) - 1, 1) for one in sequences[:2]] + [Span(sequences[2], 11, 19)]
        if rank:
            runner.follow(first)
            runner.follow(then)
            return []
        runner.run(first)
        return runner.run(then)

    drawn = on_all(ranks, compute)[0]
    assert len(drawn) == 3
    for span, token, logprob in drawn:
        with torch.no_grad():
            logits = whole(torch.tensor([span.sequence.tokens])).logits[0, -1] / 1.3
        assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)
    sizes = [runner.kv_bytes for runner in runners]
    assert len(set(sizes)) == 1
    assert sizes[0] == whole_kv_bytes(empty) // min(ranks, 2)
    for team in teams:
        team.close()


def whole_kv_bytes(whole: PreTrainedModel) -> int:
    runner = Runner(whole, 40, 8, 128)
    runner.take_kv()
    return runner.kv_bytes


def test_a_rank_holds_its_part_of_the_weights() -> None:
    whole = model(CONFIGS["qwen2"])
    shares = [Share(rank, 2).model(whole) for rank in range(2)]
    size = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    for share in shares:
        held = {name: parameter.numel() for name, parameter in share.named_parameters()}
        for name, count in held.items():
            if "_proj.weight" in name and "mlp" not in name:
                assert count == size[name] // 2, name
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj", "lm_head"):
        weight = f"{name}.weight"
        assert sum(share.get_parameter(weight).numel() for share in shares) == size[weight]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(4, 2, 3), (3, 1, 2), (6, 3, 2), (12, 4, 6), (8, 8, 16)]
)
def test_heads_that_cannot_be_divided_are_refused(heads: int, kv_heads: int, ranks: int) -> None:
    config = LlamaConfig(
        **{**SHAPE, "hidden_size": 48, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    )
    with pytest.raises(ValueError, match=f"{heads} heads and {kv_heads} KV heads .* {ranks} ranks"):
        check_share(config, ranks)


# --- sums ---------------------------------------------------------------------------------------


@pytest.fixture
def sums() -> Iterator[Callable[[int], list[SocketSum]]]:
    made: list[SocketSum] = []

    def of(ranks: int) -> list[SocketSum]:
        pairs = [socket.socketpair() for _ in range(ranks - 1)]
        made.append(SocketSum(0, [own for own, _ in pairs]))
        made.extend(SocketSum(rank, [theirs]) for rank, (_, theirs) in enumerate(pairs, start=1))
        return made

    yield of
    for one in made:
        one.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_same_sum_which_depends_on_no_other_row(
    sums: Callable[[int], list[SocketSum]], ranks: int, dtype: torch.dtype
) -> None:
    parts = [torch.randn(700, 60).to(dtype) for _ in range(ranks)]
    made = sums(ranks)
    whole = on_all(ranks, lambda rank: made[rank](parts[rank]))
    few = on_all(ranks, lambda rank: made[rank](parts[rank][40:43]))
    want = sum(part.double() for part in parts)
    for rank in range(ranks):
        assert torch.equal(whole[rank], whole[0])
        assert torch.equal(few[rank], whole[0][40:43])
    assert torch.allclose(whole[0].double(), want, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    assert whole[0].dtype is dtype


@pytest.mark.parametrize("gone", [0, 1])
def test_a_sum_with_a_rank_that_is_gone_fails(sums: Callable[[int], list[SocketSum]], gone: int) -> None:
    made = sums(2)
    made[gone].close()
    with pytest.raises(OSError):
        made[1 - gone](torch.zeros(5))


def test_a_sum_that_is_aborted_fails_whoever_waits(sums: Callable[[int], list[SocketSum]]) -> None:
    made = sums(2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(made[0], torch.zeros(5))
        made[0].abort()
        with pytest.raises(OSError):
            waiting.result(20.0)


def test_a_rank_that_hangs_is_waited_for_at_most_so_long(sums: Callable[[int], list[SocketSum]]) -> None:
    lead, _ = sums(2)
    wait_at_most(lead._sockets[0], 0.05)
    with pytest.raises(OSError):
        lead(torch.zeros(5))


def test_a_rank_that_never_comes_is_an_error(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(OSError):
        meet(store, 0, 2, tmp_path / "a.sock", device=CPU, timeout_s=0.1)
    assert not list(tmp_path.iterdir())
