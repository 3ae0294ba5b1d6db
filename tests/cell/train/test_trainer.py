"""Micro-steps on one rank, against the formula by plain autograd."""

from __future__ import annotations

import copy
import math
import struct
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gyre.cell.model import load_model, training_model
from gyre.cell.train.deal import deal
from gyre.cell.train.trainer import Trainer
from gyre.loss import LossConfig, MicroStepStats, Trajectory
from tests.cell.gradients import assert_same_gradients, gradients_by_formula, loss_by_formula
from tests.cell.parts import TEMPERATURE, micro_step, trajectory

LOSS = LossConfig(clip_low=0.2, clip_high=0.2)


@pytest.fixture(scope="module")
def policy(policy_folder: Path) -> PreTrainedModel:
    return load_model(policy_folder, "float32", torch.device("cpu"))


@pytest.fixture
def trainer(policy: PreTrainedModel) -> Trainer:
    return make_trainer(policy)


def make_trainer(policy: PreTrainedModel, loss: LossConfig = LOSS) -> Trainer:
    model = training_model(policy, None)
    model.load_state_dict(policy.state_dict())
    return Trainer(model, loss, TEMPERATURE, 0, 1)


def sampled_by(policy: PreTrainedModel, of: Trajectory, shift: float = 0.0) -> Trajectory:
    """The same trajectory with old log-probabilities as `policy` gives them, each `shift` lower."""
    ids = torch.frombuffer(bytearray(of.token_ids), dtype=torch.int32).long()
    with torch.no_grad():
        logits = policy(input_ids=ids.unsqueeze(0)).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, ids[1:, None]).squeeze(-1)
    old = [0.0, *(logprobs - shift).tolist()]
    return msgspec.structs.replace(of, old_logprobs=struct.pack(f"<{len(old)}f", *old))


def group(policy: PreTrainedModel) -> list[Trajectory]:
    """Of unlike lengths; ratios within and beyond both bounds, each with either sign of the advantage."""
    shifts = [0.0, 0.05, -0.05, 0.4, 0.4, -0.4, -0.4]
    signs = [1.0, -1.0, 1.5, 1.0, -1.0, 1.0, -1.0]
    return [
        sampled_by(policy, trajectory(i, tokens=8 + 5 * i, advantage=sign, weight=0.2 + 0.1 * i), shift)
        for i, (shift, sign) in enumerate(zip(shifts, signs, strict=True))
    ]


def gradients(trainer: Trainer, *parts: list[Trajectory]) -> list[Tensor]:
    trainer.drop_gradients()
    for index, part in enumerate(parts):
        trainer.micro_step(micro_step(*part, index=index))
    return trainer.gradients


def test_the_gradient_is_that_of_the_formula(policy: PreTrainedModel, trainer: Trainer) -> None:
    trajectories = group(policy)
    expected = gradients_by_formula(copy.deepcopy(policy), trajectories, LOSS, TEMPERATURE)
    assert_same_gradients(gradients(trainer, trajectories), expected)


def test_the_gradient_does_not_depend_on_the_cut(policy: PreTrainedModel, trainer: Trainer) -> None:
    trajectories = group(policy)
    whole = gradients(trainer, trajectories)
    for cut in ([trajectories[:1], trajectories[1:]], [[t] for t in reversed(trajectories)]):
        assert_same_gradients(gradients(trainer, *cut), whole)


def test_the_gradient_and_the_sums_do_not_depend_on_the_batches(
    policy: PreTrainedModel, trainer: Trainer
) -> None:
    trajectories = group(policy)
    at_once = trainer.micro_step(micro_step(*trajectories))
    whole = trainer.gradients
    trainer.drop_gradients()
    batches = ((6, 0, 3), (5,), (1, 4, 2))
    in_batches = trainer.micro_step(msgspec.structs.replace(micro_step(*trajectories), batches=batches))
    assert_same_gradients(trainer.gradients, whole)
    for field in ("trajectories", "tokens", "trained_tokens", "clipped"):
        assert getattr(in_batches, field) == getattr(at_once, field)
    assert in_batches.loss == pytest.approx(at_once.loss, rel=1e-4)


def test_a_micro_step_does_not_depend_on_what_was_accumulated(
    policy: PreTrainedModel, trainer: Trainer
) -> None:
    """Bit by bit: it is computed from zero, then added."""
    first, second = group(policy)[:2], group(policy)[2:]
    parts = [gradients(trainer, part) for part in (first, second)]
    both = gradients(trainer, first, second)
    for total, one, other in zip(both, *parts, strict=True):
        assert torch.equal(total, torch.zeros_like(one) + one + other)


def test_stats_are_sums_over_its_trajectories(policy: PreTrainedModel, trainer: Trainer) -> None:
    trajectories = group(policy)
    stats = trainer.micro_step(micro_step(*trajectories))
    expected = loss_by_formula(copy.deepcopy(policy).double(), trajectories, LOSS, TEMPERATURE)
    trained = sum(t.trainable_tokens for t in trajectories)
    assert (stats.trajectories, stats.trained_tokens) == (7, trained)
    assert stats.tokens == sum(t.length_tokens for t in trajectories)
    assert stats.loss == pytest.approx(expected.item(), rel=1e-4)
    # Each shift is 0.4 beyond a bound of 0.2: those with something to win by going further are clipped.
    assert stats.clipped == 2
    assert 0.0 < stats.entropy / trained < math.log(policy.config.vocab_size)
    drift = sum(
        abs(s) * t.trainable_tokens for s, t in zip([0, 0.05, 0.05, *[0.4] * 4], trajectories, strict=True)
    )
    assert stats.logprob_drift == pytest.approx(drift, rel=1e-3)
    assert stats.seconds > 0.0


def test_masked_tokens_touch_neither_loss_nor_gradient(policy: PreTrainedModel, trainer: Trainer) -> None:
    (plain,) = group(policy)[1:2]
    old = torch.frombuffer(bytearray(plain.old_logprobs), dtype=torch.float32)
    old[torch.frombuffer(bytearray(plain.trainable), dtype=torch.uint8) == 0] = math.nan
    odd = msgspec.structs.replace(plain, old_logprobs=old.numpy().tobytes())
    results = []
    for one in (plain, odd):
        trainer.drop_gradients()
        stats = trainer.micro_step(micro_step(one))
        results.append((msgspec.structs.replace(stats, seconds=0.0), trainer.gradients))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


def test_context_behind_the_last_trained_token_changes_nothing(
    policy: PreTrainedModel, trainer: Trainer
) -> None:
    (plain,) = group(policy)[1:2]
    longer = msgspec.structs.replace(
        plain,
        token_ids=plain.token_ids + struct.pack("<3i", 7, 8, 9),
        trainable=plain.trainable + bytes(3),
        old_logprobs=plain.old_logprobs + bytes(12),
        versions=plain.versions + struct.pack("<3i", -1, -1, -1),
    )
    assert_same_gradients(gradients(trainer, [longer]), gradients(trainer, [plain]))


def test_a_trajectory_that_is_all_masked_counts_nothing(policy: PreTrainedModel, trainer: Trainer) -> None:
    silent = trajectory(50, tokens=9, trained=0.0, advantage=5.0)
    plain = group(policy)[:2]
    assert_same_gradients(gradients(trainer, [silent, *plain]), gradients(trainer, plain))
    trainer.drop_gradients()
    stats = trainer.micro_step(micro_step(silent))
    assert not any(gradient.any() for gradient in trainer.gradients)
    assert (stats.loss, stats.trained_tokens, stats.clipped, stats.trajectories) == (0.0, 0, 0, 1)


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_micro_step_with_next_to_nothing_in_it(trainer: Trainer, tokens: int) -> None:
    trajectories = [trajectory(1, tokens=1)] * tokens
    stats = trainer.micro_step(micro_step(*trajectories))
    assert not any(gradient.any() for gradient in trainer.gradients)
    assert msgspec.structs.replace(stats, seconds=0.0) == MicroStepStats(trajectories=tokens, tokens=tokens)


def test_a_loss_that_is_not_finite_names_its_micro_step(policy: PreTrainedModel, trainer: Trainer) -> None:
    good = group(policy)[:1]
    before = [gradient.clone() for gradient in gradients(trainer, good)]
    bad = sampled_by(policy, trajectory(3, advantage=-1.0), shift=math.inf)
    with pytest.raises(FloatingPointError, match=r"micro-step 4\.g000009\.2: the loss is inf"):
        trainer.micro_step(micro_step(bad, step=4, group=9, index=2))
    assert all(torch.equal(one, other) for one, other in zip(trainer.gradients, before, strict=True))


def test_on_policy_nothing_is_clipped(policy: PreTrainedModel) -> None:
    """However narrow the bounds: training sees the log-probabilities that sampling saw."""
    trainer = make_trainer(policy, LossConfig(clip_low=1e-3, clip_high=1e-3))
    trajectories = [sampled_by(policy, trajectory(i, tokens=20 + i)) for i in range(4)]
    stats = trainer.micro_step(micro_step(*trajectories))
    assert stats.clipped == 0
    assert stats.logprob_drift / stats.trained_tokens < 1e-5


def test_each_rank_computes_what_it_is_dealt(policy: PreTrainedModel) -> None:
    trajectories = group(policy)
    whole = micro_step(*trajectories)
    dealt = [[row for parts in deal(whole, 3) for row in parts[rank]] for rank in range(3)]
    assert sorted(row.execution for rows in dealt for row in rows) == [t.execution for t in trajectories]
    model = make_trainer(policy).model
    counts = []
    for rank in range(3):
        # Without a process group nothing is summed: what each computes is three times its own part.
        trainer = Trainer(model, LOSS, TEMPERATURE, rank, 3)
        counts.append(trainer.micro_step(whole).trajectories)
        alone = gradients(make_trainer(policy), dealt[rank])
        assert_same_gradients(trainer.gradients, [3 * gradient for gradient in alone])
    assert counts == [2, 2, 3]


def test_a_bfloat16_module_has_float32_gradients(policy_folder: Path) -> None:
    policy = load_model(policy_folder, "bfloat16", torch.device("cpu"))
    trainer = make_trainer(policy)
    trainer.micro_step(micro_step(*group(policy)))
    assert {gradient.dtype for gradient in trainer.gradients} == {torch.float32}
    assert all(gradient.isfinite().all() for gradient in trainer.gradients)
    expected = gradients_by_formula(copy.deepcopy(policy), group(policy), LOSS, TEMPERATURE)
    assert_same_gradients(trainer.gradients, expected, tolerance=0.05)


def test_the_training_module_has_memory_of_its_own(policy: PreTrainedModel) -> None:
    model = training_model(policy, None)
    theirs = {parameter.data_ptr() for parameter in policy.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in model.parameters()}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in policy.named_parameters()]
