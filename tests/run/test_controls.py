"""What nothing can be learned from teaches nothing: the reward is no artefact of the system. With a learning
rate of 0: test_stopping.py."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from gyre.trajectory.reader import JournalReader
from tests.run.conftest import Waited
from tests.run.jobs import rise, running

pytestmark = [pytest.mark.timeout(420)]

STEPS = 8
# As many steps without the shuffling gain 0.4 to 0.5.
NO_RISE = 0.25


def test_with_shuffled_advantages_the_reward_does_not_rise(waited: Waited, tmp_path: Path) -> None:
    overrides = [
        "seed=105",
        "tasks.seed=105",
        "eval.seed=1105",
        "model.recipe=",
        "model.warm_start=",
        f"model.path={waited.policy}",
        f"train.steps={STEPS}",
        "train.lr_schedule=constant",
        f"eval.every_steps={STEPS}",
        "sampling.shuffle_advantages=true",
    ]
    with running(tmp_path / "job", *overrides) as job:
        assert job.exit(400.0) == 0
        steps = job.named("step")
        assert [event["step"] for event in steps] == list(range(STEPS))
        assert all(event["grad_norm"] > 0 for event in steps)
    assert rise(tmp_path / "job")[0] < NO_RISE
    correlation, error = score_correlation(tmp_path / "job")
    assert abs(correlation) < 4 * error


def score_correlation(run_dir: Path) -> tuple[float, float]:
    """Of advantage and score, the mean over all groups that were trained on; 1 without shuffling. And the
    standard error that a deal at random leaves: a group of n has 1 / sqrt(n - 1)."""
    with JournalReader(run_dir / "journal.db") as journal:
        trained = [
            group for group in journal.groups() if group.split == "train" and any(group.advantages.values())
        ]
    correlations = [
        statistics.correlation(
            [group.scores[name] for name in group.advantages], [*group.advantages.values()]
        )
        for group in trained
    ]
    variance = sum(1 / (len(group.advantages) - 1) for group in trained)
    return statistics.mean(correlations), math.sqrt(variance) / len(trained)
