"""What the core puts into a checkpoint, as others read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gyre.cell.checkpoints import CheckpointError
from gyre.cell.config import TrainConfig
from gyre.cell.engine.memory import release_parameters
from gyre.cell.model import end_token_ids, load_model
from gyre.cell.train.optimizer import MasterWeights
from gyre.cell.train.saving import load_optimizer, save_optimizer, save_weights
from tests.cell.parts import write_policy

CPU = torch.device("cpu")
PROMPT = torch.arange(1, 12).unsqueeze(0)


def save(folder: Path, model: PreTrainedModel, tokenizer: Path) -> None:
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    release_parameters(model)
    save_weights(folder, model, weights, tokenizer)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_reads_what_was_saved(tmp_path: Path, tied: bool, dtype: str) -> None:
    source = write_policy(tmp_path / "policy", tied=tied)
    model = load_model(source, dtype, CPU)
    with torch.no_grad():
        model.get_input_embeddings().weight += 1.0
        expected = model(PROMPT).logits
    (saved := tmp_path / "saved").mkdir()
    save(saved, model, source)
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype="auto").eval()
    assert loaded.dtype == getattr(torch, dtype)
    with torch.no_grad():
        assert torch.equal(loaded(PROMPT).logits, expected)


def test_its_tokenizer_and_end_tokens_are_there(tmp_path: Path, policy_folder: Path) -> None:
    save(tmp_path, load_model(policy_folder, "float32", CPU), policy_folder)
    messages = [{"role": "user", "content": "next: k7.csv"}]
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path, policy_folder))
    shown = ours.apply_chat_template(messages, tokenize=False)
    assert shown == theirs.apply_chat_template(messages, tokenize=False)
    assert ours(shown)["input_ids"] == theirs(shown)["input_ids"]
    assert end_token_ids(tmp_path) == end_token_ids(policy_folder)


def test_a_saved_model_can_be_saved_again(tmp_path: Path, policy_folder: Path) -> None:
    """A job that goes on from a checkpoint by `[model] path` writes checkpoints too."""
    first, second = tmp_path / "first", tmp_path / "second"
    for source, target in ((policy_folder, first), (first, second)):
        target.mkdir()
        save(target, load_model(source, "float32", CPU), source)
    assert sorted(p.name for p in first.iterdir()) == sorted(p.name for p in second.iterdir())
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def masters(rows: int = 5) -> MasterWeights:
    return MasterWeights([torch.ones(rows, 2), torch.ones(3)], TrainConfig())


def test_an_optimizer_shard_is_of_one_rank(tmp_path: Path) -> None:
    save_optimizer(tmp_path, masters(), 1)
    fresh = masters()
    with torch.no_grad():
        fresh.weights[0].zero_()
    load_optimizer(tmp_path, fresh, 1)
    assert torch.equal(fresh.weights[0], torch.ones(5, 2))
    with pytest.raises(CheckpointError, match="rank 0 finds no optimizer shard"):
        load_optimizer(tmp_path, fresh, 0)


def test_a_shard_of_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    save_optimizer(tmp_path, masters(rows=3), 0)
    with pytest.raises(CheckpointError, match="rank 0 finds no optimizer shard of its layout") as caught:
        load_optimizer(tmp_path, masters(rows=5), 0)
    assert caught.value.folder == tmp_path
