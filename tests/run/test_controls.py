"""What nothing can be learned from teaches nothing: the reward is no artefact of the system. With a learning
rate of 0: test_stopping.py. And what the events of such a job tell."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from gyre.trajectory.reader import JournalReader
from tests.run.conftest import Waited
from tests.run.jobs import RunningJob, rise, running

pytestmark = [pytest.mark.timeout(550)]

STEPS = 6
# Without the shuffling five steps gain 0.31 to 0.35 and eight 0.4 to 0.5; the standard error is 0.055.
NO_RISE = 0.23


@pytest.fixture(scope="module")
def job(waited: Waited, tmp_path_factory: pytest.TempPathFactory) -> RunningJob:
    """One with shuffled advantages, over."""
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
    with running(tmp_path_factory.mktemp("controls") / "job", *overrides) as job:
        assert job.exit(400.0) == 0
    return job


def test_with_shuffled_advantages_the_reward_does_not_rise(job: RunningJob) -> None:
    steps = job.named("step")
    assert [event["step"] for event in steps] == list(range(STEPS))
    assert all(event["grad_norm"] > 0 for event in steps)
    assert rise(job.run_dir)[0] < NO_RISE
    correlation, error = score_correlation(job.run_dir)
    assert abs(correlation) < 4 * error


def test_what_moves_can_be_followed_through_a_role_change_by_its_ids(job: RunningJob) -> None:
    """As a person would, with grep. Executions are cut between two calls, or in one."""
    moves = job.named("kv_moved") + job.named("kv_not_moved")
    assert moves
    for move in moves:
        change, execution = grep(job, move["change"]), grep(job, move["execution"])
        assert {event["change"] for event in change} == {move["change"]}
        names = [event["event"] for event in change]
        assert (names[0], names[-1], names.count("route_closed")) == (
            "role_change_ordered",
            "role_change",
            1,
        )
        assert [event["state"] for event in change if event["event"] == "role_change_state"] == [
            *change[-1]["states_s"]
        ]
        assert [e.get("state") for e in change[: change.index(move)]].count("cancel") == 1
        story = [event["event"] for event in execution]
        assert story.index("harness_started") < execution.index(move) < story.index("execution_finished")


def test_a_call_goes_on_once_its_kv_has_moved_or_has_not(job: RunningJob) -> None:
    """Of those in flight at a change. A quick job may have none; test_handover.py has one for certain."""
    with JournalReader(job.run_dir / "journal.db") as journal:
        for move in job.named("call_moved"):
            change = grep(job, move["change"])
            before = change[: change.index(move)]
            (kv,) = (e for e in before if "kv_" in e["event"] and e["call"] == move["call"])
            assert (kv["cell"], kv["to_cell"]) == (move["cell"], move["to_cell"])
            (call,) = (call for call in journal.calls(move["execution"]) if call.call == move["call"])
            assert call.reroutes > 0
            assert len(call.output_ids) >= move["tokens"]


def grep(job: RunningJob, words: str) -> list[dict[str, Any]]:
    lines = (job.run_dir / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if words in line]


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
